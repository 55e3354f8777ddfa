"""How long from a call in the kernel to the first training step, with six ranks.

Prints hetkit's first session, next session and next run beside ``torch.multiprocessing.spawn`` of
the same work, measured in turn (A B A B) in one run. Each first session is a fresh interpreter.

Run: python tests/benchmarks/bench_start.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from digits import digits, loss, make_model, make_optimizer, make_task

import hetkit as hk

RANKS = 6
ROUNDS = 2
LIMIT_S = 120.0
REACH = {"first session": 3.5, "next session": 0.3, "next run": 0.05}


def first_step_s(session: hk.Session) -> float:
    """Returns the seconds from the call until all ranks have reported one more step."""
    done = session.progress.step
    began = time.monotonic()
    session.step(1)
    while session.progress.step <= done:
        if session.error is not None:
            raise session.error
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(session)
        time.sleep(0.001)
    return time.monotonic() - began


def measure_hetkit() -> dict[str, float]:
    """Measures in this process, which must be fresh: nothing of hetkit may have run before."""
    task = make_task()
    began = time.monotonic()
    with hk.Session(task, devices=f"cpu*{RANKS}", global_batch=192) as session:
        first_step_s(session)
        first = time.monotonic() - began
        session.stop()
        session.wait(LIMIT_S)
        next_run = []
        for _ in range(3):
            next_run.append(first_step_s(session))
            session.stop()
            session.wait(LIMIT_S)
    next_session = []
    for _ in range(3):
        began = time.monotonic()
        with hk.Session(task, devices=f"cpu*{RANKS}", global_batch=192) as session:
            first_step_s(session)
            next_session.append(time.monotonic() - began)
    return {
        "first session": first,
        "next session": median(next_session),
        "next run": median(next_run),
    }


def spawned(rank: int, folder: str, began: float) -> None:
    """One rank of the yardstick: plain DDP, one step."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model.parameters())
    share = 192 // RANKS
    images, labels = (part[rank * share : (rank + 1) * share] for part in digits())
    loss(model, (images, labels)).backward()
    optimizer.step()
    if rank == 0:
        Path(folder, "seconds").write_text(str(time.monotonic() - began))
    dist.barrier()
    dist.destroy_process_group()


def measure_spawn() -> float:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, args=(folder, time.monotonic()), nprocs=RANKS)
        return float(Path(folder, "seconds").read_text())


def main() -> None:
    if "--hetkit" in sys.argv:
        print(" ".join(str(seconds) for seconds in measure_hetkit().values()))
        return
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(environment)
    runs: dict[str, list[float]] = {name: [] for name in REACH}
    spawn: list[float] = []
    for _ in range(ROUNDS):
        command = [sys.executable, __file__, "--hetkit"]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment
        )
        for name, seconds in zip(runs, result.stdout.split()[-3:], strict=True):
            runs[name].append(float(seconds))
        spawn.append(measure_spawn())
    yardstick = median(spawn)
    print(f"kernel to first step, {RANKS} ranks on {os.cpu_count()} cores, medians of {ROUNDS}:")
    print(f"{'torch.multiprocessing.spawn':30s} {yardstick:7.3f} s")
    for name, seconds in runs.items():
        value = median(seconds)
        print(
            f"{'hetkit, ' + name:30s} {value:7.3f} s   {value / yardstick:6.3f} of spawn   "
            f"(reach: ≤ {REACH[name]} s)"
        )


if __name__ == "__main__":
    main()
