"""Small tasks, and ways to look at what real processes do."""

import fcntl
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import hetkit as hk

LIMIT_S = 60.0
"""A hang guard: nothing here takes a second on an idle machine."""

SAMPLES = 64


@pytest.fixture(autouse=True)
def _no_lock_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives each test locks of its own, and fails one that leaves a device locked."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield
    deadline = time.monotonic() + LIMIT_S
    while held := [path.name for path in folder.glob("*/*.lock") if _is_locked(path)]:
        assert time.monotonic() < deadline, f"still locked: {held}"
        time.sleep(0.01)


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


@pytest.fixture(scope="session")
def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """64 samples of 3 features with a noisy linear target."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 3, generator=generator)
    noise = 0.1 * torch.randn(SAMPLES, 1, generator=generator)
    return features, features.sum(1, keepdim=True) + noise


@pytest.fixture
def make_task(numbers: tuple[torch.Tensor, torch.Tensor]) -> Callable[..., hk.Task]:
    """Makes a tiny regression task; its parts can be replaced."""

    def make(**parts: Any) -> hk.Task:
        usual: dict[str, Any] = {
            "model": lambda: torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
            ),
            "data": numbers,
            "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        }
        return hk.Task(**{**usual, **parts})

    return make


@pytest.fixture
def fast() -> hk.Fleet:
    """Two emulated devices that cost next to no time."""
    return hk.emulate("A100 + V100", pace={"A100": 2.0}, sample_s=1e-5)


@pytest.fixture
def slow() -> hk.Fleet:
    """Two emulated devices whose step of 8 + 8 samples takes 0.1 s."""
    return hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=0.0125)


@pytest.fixture
def make_session(
    make_task: Callable[..., hk.Task], fast: hk.Fleet
) -> Iterator[Callable[..., hk.Session]]:
    """Makes sessions of 4 steps an epoch on an explicit split, and closes them."""
    made: list[hk.Session] = []

    def make(task: hk.Task | None = None, **arguments: Any) -> hk.Session:
        usual = {"devices": fast, "global_batch": 16}
        if "devices" not in arguments:
            usual["batches"] = [10, 6]
        made.append(hk.Session(task or make_task(), **{**usual, **arguments}))
        return made[-1]

    yield make
    for session in made:
        session.close()


def wait_until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    """Waits for a condition; fails when it does not come true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"nothing happened for {limit_s} s")
        time.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition."""
    return wait_until


@pytest.fixture
def reach() -> Callable[[hk.Session, str], None]:
    """Waits until a session is in a state."""

    def wait(session: hk.Session, state: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while session.state != state:
            if session.error is not None and state != "failed":
                raise session.error
            if time.monotonic() > deadline:
                pytest.fail(f"the session is {session.state}, not {state}")
            time.sleep(0.005)

    return wait


def places(session: hk.Session) -> list[tuple[int, int]]:
    """Returns each rank's (epoch, step)."""
    return session.call(lambda worker: (worker.epoch, worker.step))


@pytest.fixture(name="places")
def _places() -> Callable[[hk.Session], list[tuple[int, int]]]:
    """Tells where each rank stands: (epoch, step)."""
    return places


@pytest.fixture
def pids() -> Callable[[hk.Session], list[int]]:
    """Tells the workers' processes."""
    return lambda session: session.call(lambda worker: os.getpid())


@pytest.fixture
def weights() -> Callable[[hk.Session], torch.Tensor]:
    """Tells all of the model's parameters, in one flat tensor."""

    def read(session: hk.Session) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in session.model().parameters()])

    return read


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be waited for has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(name="gone")
def _gone() -> Callable[[int], bool]:
    """Tells whether a process has ended."""
    return gone


HEAD = """
import os, sys, threading, time
import hetkit as hk

def make_model():
    import torch
    return torch.nn.Linear(3, 1)

def make_data():
    import torch
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 3, generator=generator), torch.randn(64, 1, generator=generator)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def optimizer(parameters):
    import torch
    return torch.optim.SGD(parameters, lr=0.05)

def task(**parts):
    usual = dict(model=make_model, data=make_data, loss=loss, optimizer=optimizer)
    return hk.Task(**{**usual, **parts})

fleet = hk.emulate("A100 + V100", pace={"A100": 2.0}, sample_s=1e-5)
"""


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a user's script: its ``__main__`` has a task in it, then the given lines."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str) -> "subprocess.Popen[str]":
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(HEAD + textwrap.dedent(text))
        started.append(
            subprocess.Popen(
                [sys.executable, str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_script(start_script: Callable[[str], "subprocess.Popen[str]"]) -> Callable[[str], str]:
    """Runs a user's script to its end and returns what it printed."""

    def run(text: str) -> str:
        process = start_script(text)
        output, errors = process.communicate(timeout=2 * LIMIT_S)
        assert process.returncode == 0, errors + output
        return output

    return run
