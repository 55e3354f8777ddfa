"""What hetkit costs where it has nothing to gain: like devices, against plain DDP.

Two equal CPU ranks train the same model on the same samples, once by hetkit's own loop (plans,
grants, the dispatching comm hook, the overflow check, telemetry) and once by a plain DDP loop, in
the same worker processes, in short turns (A B A B). Prints the ratio of the median steps.

Run: python tests/benchmarks/bench_overhead.py
"""

import random
import sys
import time
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
STEPS = 20
DROPPED = 3
"""Of each turn, the first steps find the other's data in the caches."""
ROUNDS = 60
LIMIT_S = 120.0


def make_model() -> nn.Module:
    """About 2.2 million parameters: a step of tens of milliseconds on one core."""
    return nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


class PlainDdp:
    """A plain DDP loop, kept in its worker from turn to turn."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(self.model.parameters())
        self.images, self.labels = digits()

    def step(self, number: int, rank: int, world_size: int) -> None:
        share = GLOBAL_BATCH // world_size
        first = (number * GLOBAL_BATCH + rank * share) % (len(self.images) - share)
        rows = torch.arange(first, first + share)
        loss(self.model, (self.images[rows], self.labels[rows])).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def plain_steps(worker: Any) -> float:
    """Executes steps of plain DDP in the worker and returns their median in seconds."""
    kept = worker.model.__dict__.setdefault("plain_ddp", [])
    if not kept:
        kept.append(PlainDdp())
    times = []
    for number in range(STEPS):
        began = time.monotonic()
        kept[0].step(number, worker.rank, worker.world_size)
        times.append(time.monotonic() - began)
    return median(times[DROPPED:])


def hetkit_steps(session: hk.Session) -> float:
    """Executes steps under hetkit and returns the slower rank's median in seconds."""
    done = session.progress.step
    session.step(STEPS)
    began = time.monotonic()
    while session.progress.step < done + STEPS:
        if session.error is not None:
            raise session.error
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(session)
        time.sleep(0.1)  # a watching kernel takes its time from the ranks
    records = session.history.records_since(done + DROPPED)
    by_rank = zip(*([rank.step_s for rank in record.ranks] for record in records), strict=True)
    return max(median(seconds) for seconds in by_rank)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the ratios' median, by the bootstrap."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    task = hk.Task(model=make_model, data=digits(), loss=loss, optimizer=make_optimizer)
    pairs = []
    with hk.Session(
        task, devices=f"cpu*{RANKS}", global_batch=GLOBAL_BATCH, batches="even"
    ) as session:
        session.run(epochs=10_000)
        session.pause()
        for _ in range(ROUNDS):
            ours = hetkit_steps(session)
            pairs.append((ours, max(session.call(plain_steps))))
    ours, plain = (median(column) for column in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    low, high = interval(ratios)
    print(
        f"{RANKS} like ranks, median step: hetkit {ours * 1e3:.2f} ms, plain DDP "
        f"{plain * 1e3:.2f} ms; of {ROUNDS} pairs of {STEPS} steps the median ratio is "
        f"{median(ratios):.3f} (95 %: {low:.3f} to {high:.3f}; reach: ≤ 1.02)"
    )


if __name__ == "__main__":
    main()
