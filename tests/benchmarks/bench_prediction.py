"""Predicted against measured: the step of every split × link rate × codec, told before it ran.

Two emulated devices, an A100 beside a V100, with a fixed cost per pass. A session measures
the even and the balanced split without compression, as any session does at its beginning; then
`what_if` predicts all the others, and each is run, twice, a round of all between its two runs.
Steps take 0.15 s or more of emulated time, so that this machine's own noise stays small beside it.

Run: python tests/benchmarks/bench_prediction.py
Reach: median error ≤ 3 %, worst ≤ 8 %.
"""

import sys
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from digits import digits, loss, make_optimizer

import hetkit as hk
from hetkit.planning.comparison import WhatIf

GLOBAL_BATCH = 32
STEPS = 8
ROUNDS = 2
DROPPED = 2
SPLITS: tuple[Any, ...] = ("even", (20, 12), (24, 8))
LINKS = ("1.5MB/s, 100us", "6MB/s, 1ms", "50MB/s, 100us")
CODECS = ("none", "fp16", "int8", "topk", "powersgd")
LIMIT_S = 120.0


def make_model() -> nn.Module:
    """About 90,000 parameters in two buckets of the size below."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def make_fleet(link: str) -> hk.Fleet:
    return hk.emulate(
        "1xA100 + 1xV100", pace={"A100": 2.3}, sample_s=0.012, launch_s=0.015, link=link
    )


def run(session: hk.Session, **settings: Any) -> list[float]:
    """Runs an epoch and returns its steps without the first two."""
    session.set(**settings)
    session.run(epochs=1)
    session.wait(LIMIT_S)
    records = session.history.records_since(session.progress.step - STEPS + DROPPED - 1)
    return [record.step_s for record in records]


def compare(link: str) -> list[tuple[Any, str, WhatIf, float]]:
    """Predicts every split and codec over one link, then measures each."""
    images, labels = digits()
    samples = GLOBAL_BATCH * STEPS
    task = hk.Task(
        model=make_model,
        data=(images[:samples], labels[:samples]),
        loss=loss,
        optimizer=make_optimizer,
    )
    cases = list(product(SPLITS, CODECS))
    fleet = make_fleet(link)
    with hk.Session(
        task, devices=fleet, global_batch=GLOBAL_BATCH, bucket_bytes=200_000, guard_every=0
    ) as session:
        for batches in ("even", "auto", "even"):
            run(session, batches=batches)
        told = [
            session.what_if(batches=batches, compression=codec, bucket_bytes=200_000)
            for batches, codec in cases
        ]
        seen: dict[Any, list[float]] = {case: [] for case in cases}
        for batches, codec in cases * ROUNDS:
            seen[batches, codec] += run(session, batches=batches, compression=codec)
        return [
            (*case, what_if, median(seen[case])) for case, what_if in zip(cases, told, strict=True)
        ]


def main() -> None:
    errors, inside = [], 0
    print(f"{'link':<16}{'split':<10}{'codec':<10}{'predicted':>10}{'measured':>10}{'error':>8}")
    for link in LINKS:
        for batches, codec, what_if, measured_s in compare(link):
            predicted = what_if.prediction
            error = predicted.step_s / measured_s - 1
            errors.append(abs(error))
            held = predicted.low_s <= measured_s <= predicted.high_s
            inside += held
            split = batches if isinstance(batches, str) else "+".join(map(str, batches))
            print(
                f"{link:<16}{split:<10}{codec:<10}{predicted.step_s * 1e3:>7.1f} ms"
                f"{measured_s * 1e3:>7.1f} ms{error:>8.1%}{'' if held else '  outside'}",
                flush=True,
            )
    print(
        f"{len(errors)} predictions, emulated: median error {median(errors):.1%} (reach 3 %), "
        f"worst {max(errors):.1%} (reach 8 %), {inside / len(errors):.0%} inside their interval"
    )


if __name__ == "__main__":
    main()
