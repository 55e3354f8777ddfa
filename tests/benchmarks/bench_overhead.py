"""What hetkit costs where it has nothing to gain: like devices, against plain DDP.

Two equal CPU ranks train the same model on the same samples, once by hetkit's own loop (plans,
grants, the dispatching comm hook, the overflow check, telemetry) and once by a plain DDP loop, in
the same worker processes, in turn (A B A B). Prints the ratio of the median steps.

Run: python tests/benchmarks/bench_overhead.py
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from digits import digits, loss, make_optimizer

import hetkit as hk

RANKS = 2
GLOBAL_BATCH = 256
STEPS = 60
ROUNDS = 9
LIMIT_S = 120.0


def make_model() -> nn.Module:
    """About 2.2 million parameters: a step of tens of milliseconds on one core."""
    return nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def plain_loop(steps: int) -> Callable[[Any], float]:
    def run(worker: Any) -> float:
        """Plain DDP in the worker: returns the median step in seconds."""
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
        optimizer = make_optimizer(model.parameters())
        images, labels = digits()
        share = GLOBAL_BATCH // worker.world_size
        times = []
        for step in range(steps):
            began = time.monotonic()
            first = (step * GLOBAL_BATCH + worker.rank * share) % (len(images) - share)
            rows = torch.arange(first, first + share)
            loss(model, (images[rows], labels[rows])).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(time.monotonic() - began)
        return median(times[5:])

    return run


def hetkit_steps(session: hk.Session, steps: int) -> float:
    """Executes steps under hetkit and returns the median in seconds."""
    done = session.progress.step
    session.step(steps)
    began = time.monotonic()
    while session.progress.step < done + steps:
        if session.error is not None:
            raise session.error
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(session)
        time.sleep(0.05)
    records = session.history.records_since(done + 5)
    # As for the plain loop: each rank's median, then the slower rank.
    by_rank = zip(*([rank.step_s for rank in record.ranks] for record in records), strict=True)
    return max(median(seconds) for seconds in by_rank)


def main() -> None:
    task = hk.Task(model=make_model, data=digits(), loss=loss, optimizer=make_optimizer)
    pairs = []
    with hk.Session(
        task, devices=f"cpu*{RANKS}", global_batch=GLOBAL_BATCH, batches="even"
    ) as session:
        session.run(epochs=10_000)
        session.pause()
        for _ in range(ROUNDS):
            ours = hetkit_steps(session, STEPS)
            plain = max(session.call(plain_loop(STEPS)))
            pairs.append((ours, plain))
    ours, plain = (median(column) for column in zip(*pairs, strict=True))
    ratio = median(a / b for a, b in pairs)
    print(
        f"{RANKS} like ranks, median step: hetkit {ours * 1e3:.2f} ms, plain DDP "
        f"{plain * 1e3:.2f} ms, ratio {ratio:.3f} (reach: ≤ 1.02), pairs "
        + ", ".join(f"{a / b:.3f}" for a, b in pairs)
    )


if __name__ == "__main__":
    main()
