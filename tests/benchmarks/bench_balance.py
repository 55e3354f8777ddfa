"""What balancing brings on unlike devices: throughput against the even split and the model's bound.

Even and automatic split in turn (A B A B) on the same emulated devices, 1 : 2.3 and 4×1 + 2×2.3,
each in a session of its own, so that the automatic split is found anew every time. A step takes 200
to 320 ms: on a machine with few cores the exchange between six processes really costs something,
and that something belongs to no emulated device.

The bound of the fitted model is the best integer split by the step times that were fitted to the
measured ones, plus what the step really cost beside the critical rank's compute::

    bound = max_i t_i(b_i*) + measured (exchange + data + optimizer)

Beside it stands what the given paces alone would allow, Σ v_i/(n · v_min) times the even split.

Run: python tests/benchmarks/bench_balance.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from digits import make_task

import hetkit as hk
from hetkit.planning.batch_split import imbalance_floor, split_batch, step_seconds
from hetkit.planning.step_time import Observation, fit_step_time

ROUNDS = 3
LIMIT_S = 300.0
SAMPLE_S = 0.010
PACE = {"A100": 2.3}
FLEETS = {"1xA100 + 1xV100": (64, 2), "2xA100 + 4xV100": (192, 5)}
"""Samples in a step, and epochs that make about 50 of them."""

FOUND_BY_STEP = 20


@dataclass(frozen=True, kw_only=True)
class Run:
    """One session's figures, from the 20th step on, by which the split has to be found."""

    samples_per_s: float
    bound: float
    spread: float
    floor: float
    batches: tuple[int, ...]
    replans: tuple[int, ...]


def measure(fleet: hk.Fleet, global_batch: int, epochs: int, batches: str) -> Run:
    """Trains under a split and compares what came with what the fitted model allows."""
    with hk.Session(
        make_task(), devices=fleet, global_batch=global_batch, batches=batches
    ) as session:
        session.run(epochs=epochs)
        session.wait(LIMIT_S)
        records = session.history.records_since(-1)
        row = session.ledger[-1]
        replans = tuple(made.step + 1 for made in session.decisions.replans)
    models = [
        fit_step_time(
            Observation(batch=step.batch, micro_steps=1, compute_s=step.compute_s)
            for step in (record.ranks[rank] for record in records)
        )
        for rank in range(len(fleet))
    ]
    whole = [global_batch] * len(fleet)
    best = split_batch(models, global_batch, micro_batches=whole)
    settled = [r for r in records if r.step >= FOUND_BY_STEP and r.samples == global_batch]
    beside_s = median(r.step_s - r.critical.compute_s for r in settled)
    compute = [median(r.ranks[rank].compute_s for r in settled) for rank in range(len(fleet))]
    return Run(
        samples_per_s=global_batch / median(r.step_s for r in settled),
        bound=global_batch / (step_seconds(models, best, whole) + beside_s),
        spread=1 - min(compute) / max(compute),
        floor=imbalance_floor(models, best, whole),
        batches=row.batches,
        replans=replans,
    )


def reach(values: list[float], form: str = ".2f") -> str:
    """Returns the median and the reach from the least to the most."""
    return f"{median(values):{form}} ({min(values):{form}} … {max(values):{form}})"


def main() -> None:
    for spec, (global_batch, epochs) in FLEETS.items():
        fleet = hk.emulate(spec, pace=PACE, sample_s=SAMPLE_S)
        paces = [device.emulation.pace for device in fleet if device.emulation]
        ideal = sum(paces) / (len(paces) * min(paces))
        even, auto = [], []
        for _ in range(ROUNDS):
            even.append(measure(fleet, global_batch, epochs, "even"))
            auto.append(measure(fleet, global_batch, epochs, "auto"))
        gains = [a.samples_per_s / e.samples_per_s for a, e in zip(auto, even, strict=True)]
        print(f"{spec}, emulated, {ROUNDS} rounds, median (least … most):")
        print(f"  balanced / even           {reach(gains)}× of {ideal:.2f}× by the paces alone")
        bounds = [run.samples_per_s / run.bound for run in auto]
        print(f"  balanced / model's bound  {reach(bounds, '.1%')}, wanted ≥ 97 %")
        print(
            f"  spread of compute         {reach([run.spread for run in auto], '.1%')}, wanted ≤ "
            f"{max(0.02, *(run.floor for run in auto)):.1%} (the larger of 2 % and one sample)"
        )
        print(
            f"  batches {[list(run.batches) for run in auto]}, new splits before steps "
            f"{[list(run.replans) for run in auto]}, wanted by {FOUND_BY_STEP}"
        )


if __name__ == "__main__":
    main()
