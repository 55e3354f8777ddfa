"""What the exact split brings over "batch proportional to speed", on random unlike devices.

2,000 fleets of 2 to 8 devices with t(b) = a + c·b: c log-uniform from 0.3 to 3 ms per sample, a
uniform from 0 to 10 ms or to 30 ms, and a global batch of 16 to 128 samples per device. How much
there is to gain depends on how much of a step is fixed cost, so both are shown. EVIDENCE.md §2 has
10 % on average and 33 % at p95, on instances of its own. Two rules are compared with the integer
optimum:

- batches in the ratio of the speeds measured at the even split, b/t(b);
- batches in the ratio of the devices' nominal speeds, 1/c.

On small instances, with bounds, micro-batches and curves, the optimum is checked against all splits
there are.

Run: python tests/benchmarks/bench_split.py
"""

import itertools
import random
from collections.abc import Sequence
from statistics import fmean, quantiles

from hetkit.planning.batch_split import even_split, ratio_split, split_batch, step_seconds
from hetkit.planning.curve import StepCurve
from hetkit.planning.step_time import ComputeTime, StepTime

INSTANCES = 2000
SMALL = 1000
SEED = 0
MOST_LAUNCH_S = (0.01, 0.03)


def random_line(rng: random.Random, most_launch_s: float) -> StepTime:
    return StepTime(launch_s=rng.uniform(0, most_launch_s), sample_s=3e-4 * 10 ** rng.random())


def random_model(rng: random.Random) -> ComputeTime:
    line = random_line(rng, MOST_LAUNCH_S[-1])
    if rng.random() < 0.5:
        return line
    a, c = line.launch_s, line.sample_s
    bend = rng.uniform(1, 8)
    return StepCurve(sizes=(0, bend, 2 * bend), times=(a, a + c * bend, a + 4 * c * bend))


def losses(rng: random.Random, most_launch_s: float) -> tuple[float, float]:
    """Returns by how much both rules are slower than the optimum on one instance."""
    n = rng.randint(2, 8)
    models = [random_line(rng, most_launch_s) for _ in range(n)]
    total = n * rng.randint(16, 128)
    micro_batches = [total] * n
    best_s = step_seconds(
        models, split_batch(models, total, micro_batches=micro_batches), micro_batches
    )
    even = even_split(total, n)
    measured = [b / model.seconds(b, total) for model, b in zip(models, even, strict=True)]
    nominal = [1 / model.sample_s for model in models]
    slower = [
        step_seconds(models, ratio_split(speeds, total), micro_batches) / best_s - 1
        for speeds in (measured, nominal)
    ]
    return slower[0], slower[1]


def is_optimal(rng: random.Random) -> bool:
    n, total = rng.randint(1, 4), rng.randint(0, 14)
    models = [random_model(rng) for _ in range(n)]
    micro_batches = [rng.randint(1, 14) for _ in range(n)]
    caps = [rng.randint(-(-total // n), 14) for _ in range(n)]
    split = split_batch(models, total, micro_batches=micro_batches, caps=caps)
    possible = itertools.product(*(range(cap + 1) for cap in caps))
    least_s = min(
        step_seconds(models, other, micro_batches) for other in possible if sum(other) == total
    )
    return step_seconds(models, split, micro_batches) == least_s


def described(rule: str, slower: Sequence[float]) -> str:
    p95 = quantiles(slower, n=20)[-1]
    return (
        f"  proportional to {rule}: the exact split gains {fmean(slower):.1%} on average, "
        f"{p95:.1%} at p95, {max(slower):.1%} at most"
    )


def main() -> None:
    rng = random.Random(SEED)
    for most_launch_s in MOST_LAUNCH_S:
        rows = [losses(rng, most_launch_s) for _ in range(INSTANCES)]
        by_measured, by_nominal = zip(*rows, strict=True)
        print(
            f"fixed cost up to {most_launch_s * 1e3:.0f} ms, {INSTANCES:,} instances, seed {SEED}:"
        )
        print(described("the speed measured at the even split", by_measured))
        print(described("the nominal speed", by_nominal))
    optimal = sum(is_optimal(rng) for _ in range(SMALL))
    print(f"against brute force: optimal in {optimal:,} of {SMALL:,} small instances")


if __name__ == "__main__":
    main()
