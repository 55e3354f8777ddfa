"""A loop of one's own in a script, alone and under a real torchrun."""

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn import functional as F

import hetkit as hk
from hetkit.worker.order import epoch_order

LIMIT_S = 90.0
SEED = 3
GLOBAL_BATCH = 24
SAMPLES = 100

HEAD = """
import json, os, sys, time
import torch
import hetkit as hk
from torch.nn import functional as F

def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(100, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (100,), generator=generator)

def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()

def train(worker, at=lambda worker: None):
    model = worker.wrap(torch.nn.Linear(6, 3).double())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for epoch in worker.epochs(2):
        for inputs, labels in worker.batches(data()):
            with worker.step():
                at(worker)
                worker.backward(F.cross_entropy(model(inputs), labels), count=len(inputs))
        worker.evaluate(data(), {"accuracy": accuracy})
    return model

def tell(**facts):
    # In one write: torchrun's ranks share a pipe, and print() writes the line's end apart.
    os.write(1, f"TOLD {json.dumps(facts)}\\n".encode())
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script, by torchrun where it is to have several ranks."""
    running: list[subprocess.Popen[str]] = []

    def begin(text: str, ranks: int | None = 2, **environment: str) -> "subprocess.Popen[str]":
        path = tmp_path / f"train{len(running)}.py"
        path.write_text(HEAD + textwrap.dedent(text))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        running.append(
            subprocess.Popen(
                [sys.executable, *(torchrun if ranks else []), str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
            )
        )
        return running[-1]

    yield begin
    for process in running:
        with_children = (
            [process, *psutil.Process(process.pid).children(recursive=True)]
            if (process.poll() is None)
            else []
        )
        for each in with_children:
            each.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> tuple[int, list[dict], str]:
    output, errors = process.communicate(timeout=LIMIT_S)
    told = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("TOLD ")]
    return process.returncode, told, errors


def in_one_process() -> tuple[list[float], float]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    torch.manual_seed(SEED)
    model = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(2):
        order = epoch_order(SAMPLES, SEED, epoch)
        for first in range(0, SAMPLES, GLOBAL_BATCH):
            chosen = order[first : first + GLOBAL_BATCH]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
    right = (model(inputs).argmax(1) == labels).double().mean()
    return model.weight.detach().flatten().tolist(), float(right)


TRAIN = """
with hk.worker(global_batch=24, seed=3{more}) as worker:
    model = train(worker)
ledger = worker.ledger
tell(rank=worker.rank, weights=model.weight.flatten().tolist(), steps=worker.steps_done,
     ledger=[(row.last_step, row.metrics["accuracy"]) for row in ledger or []],
     folders=os.listdir(os.environ["TMPDIR"]))
"""


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (None, ""),
        (2, ", batches=[17, 7]"),
    ],
    ids=["alone", "two ranks"],
)
def test_a_script_trains_as_in_one_process(start, ranks, more):
    code, told, errors = finish(start(TRAIN.replace("{more}", more), ranks))
    assert code == 0, errors
    weights, right = in_one_process()
    assert len(told) == (ranks or 1)
    for each in told:
        torch.testing.assert_close(each["weights"], weights, rtol=1e-12, atol=1e-14)
        assert each["steps"] == 10
    (first,) = (each["ledger"] for each in told if each["rank"] == 0)
    assert [step for step, _ in first] == [4, 9]
    assert first[-1][1] == pytest.approx(right, rel=1e-12)
    assert all(each["ledger"] == [] for each in told if each["rank"])
    left = [each["folders"] for each in told if each["rank"] == 0]
    assert not [name for name in left[0] if name.startswith("hetkit-") and name != _locks()]


def _locks() -> str:
    return f"hetkit-{os.getuid()}"


def test_a_rank_that_raises_ends_all_with_its_traceback(start):
    code, _, errors = finish(
        start("""
        def at(worker):
            if worker.rank == 1 and worker.steps_done == 3:
                raise ValueError("my own mistake")

        with hk.worker(global_batch=24) as worker:
            train(worker, at)
        """)
    )
    assert code != 0
    assert "ValueError: my own mistake" in errors
    assert 'raise ValueError("my own mistake")' in errors


def test_when_rank_0_cannot_start_no_other_waits_for_it(start):
    code, told, errors = finish(
        start("""
        try:
            with hk.worker(global_batch=24, devices="cpu*3") as worker:
                train(worker)
        except hk.LaunchError as error:
            tell(rank=int(os.environ["RANK"]), text=str(error))
            time.sleep(3)  # it hosts the store
        """)
    )
    assert code == 0, errors
    said = {each["rank"]: each["text"] for each in told}
    assert "2 ranks and 3 devices" in said[0]
    assert "rank 0 could not start" in said[1]


def test_terminated_it_leaves_nothing_behind(start):
    process = start("""
    def at(worker):
        if worker.steps_done == 2:
            tell(pid=os.getpid())
            time.sleep(600)

    with hk.worker(global_batch=24) as worker:
        train(worker, at)
    """)
    assert process.stdout is not None
    pids = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.communicate()
        if line.startswith("TOLD "):
            pids.append(json.loads(line[5:])["pid"])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, pids))


def test_several_hosts_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(hk.LaunchError, match=r"on one host for now.*--nnodes 1"), hk.worker():
        pass


def test_a_loop_that_does_nothing_says_so():
    with pytest.raises(hk.TaskError, match=r"never asked for worker\.batches"), hk.worker():
        pass


def test_the_room_of_that_name_can_be_called_too():
    assert callable(importlib.import_module("hetkit.worker"))
