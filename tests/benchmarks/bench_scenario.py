"""Two A100s and four V100s on a thin wire: what balancing, int8 and AMP bring together.

The fleet is emulated: six real processes with real gradients over gloo, held to the pace of the
cards and to a link whose rate is chosen so that communication takes 35 % of the even, uncompressed
step. Emulated steps are one to three seconds, far above what six ranks cost on two cores by
themselves. Prints one table; the reaches are those of DESIGN.md §8.

Run: python tests/benchmarks/bench_scenario.py
"""

import sys
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from digits import digits, loss, make_optimizer

import hetkit as hk
from hetkit.planning.exchange_time import ring_bytes

PACE = 2.3
GLOBAL_BATCH = 192
RANKS = 6
EVEN_COMPUTE_S = 2.0
COMM_SHARE = 0.35
STEPS = 6
DROPPED = 2
LIMIT_S = 180.0

ROWS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("even", {"batches": "even"}, "the yardstick"),
    ("balanced", {"batches": "auto"}, "bound of compute alone: 1.43"),
    ("balanced, fp16", {"compression": "fp16"}, ""),
    ("balanced, int8", {"compression": "int8"}, "reach: ≥ 1.8, share ≤ 18 %"),
    ("balanced, int8, AMP", {"amp": "auto"}, "reach: ≥ 2.57"),
)


def make_model() -> nn.Module:
    """About 0.3 million parameters, in one bucket: nothing of its exchange is overlapped."""
    return nn.Sequential(
        nn.Linear(64, 480), nn.ReLU(), nn.Linear(480, 480), nn.ReLU(), nn.Linear(480, 10)
    )


def make_fleet() -> hk.Fleet:
    raw_bytes = sum(p.numel() * p.element_size() for p in make_model().parameters())
    transfer_s = EVEN_COMPUTE_S * COMM_SHARE / (1 - COMM_SHARE)
    rate = ring_bytes(RANKS, raw_bytes) / transfer_s
    return hk.emulate(
        "2xA100 + 4xV100",
        pace={"A100": PACE},
        sample_s=EVEN_COMPUTE_S / (GLOBAL_BATCH / RANKS),
        link=hk.Link(bytes_per_s=rate),
    )


def measure(session: hk.Session) -> tuple[float, float, tuple[int, ...]]:
    """Runs one epoch to settle and one to measure: median step, communication share, split."""
    for _ in range(2):
        session.run(epochs=1)
        session.wait(LIMIT_S)
    records = session.history.records_since(session.progress.step - STEPS + DROPPED)
    step_s = median(max(rank.step_s for rank in record.ranks) for record in records)
    return step_s, session.ledger[-1].comm_share, session.plan.batches


def main() -> None:
    images, labels = digits()
    samples = GLOBAL_BATCH * STEPS
    task = hk.Task(
        model=make_model,
        data=(images[:samples], labels[:samples]),
        loss=loss,
        optimizer=make_optimizer,
    )
    fleet = make_fleet()
    with hk.Session(task, devices=fleet, global_batch=GLOBAL_BATCH, batches="even") as session:
        even_s = None
        print(f"{'2×A100 + 4×V100 (emulated)':<28}{'step':>9}{'speed':>8}{'comm':>8}  split")
        for name, settings, note in ROWS:
            session.set(**settings)
            step_s, share, batches = measure(session)
            even_s = even_s or step_s
            print(
                f"{name:<28}{step_s * 1e3:>6.0f} ms{even_s / step_s:>7.2f}×{share:>7.1%}  "
                f"{' + '.join(map(str, batches))}   {note}"
            )


if __name__ == "__main__":
    main()
