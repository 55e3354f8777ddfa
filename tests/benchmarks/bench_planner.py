"""What planning costs: one split, one decision of the balancer, one verdict.

The yardsticks: a split of 64 devices in at most 1 ms and of 1,000 in at most 20 ms, and less than
0.1 % of a step of 40 ms on 6 devices for the balancer. It decides once in a window of 5 steps, on
the kernel's side, beside the steps and not in them.

Run: python tests/benchmarks/bench_planner.py
"""

import random
import time
from collections.abc import Callable
from statistics import median

from hetkit.planning.balance import WINDOW_STEPS
from hetkit.planning.balancer import BalancerState, Window, decide
from hetkit.planning.batch_split import split_batch
from hetkit.planning.curve import StepCurve
from hetkit.planning.overlap import BucketTimes, split_overlapped
from hetkit.planning.step_time import ComputeTime, Observation, StepTime
from hetkit.planning.verdict import judge

ROUNDS = 40
STEP_S = 0.04
YARDSTICKS_S = {6: None, 64: 1e-3, 1000: 20e-3}


def random_models(rng: random.Random, n: int, *, curves: bool = False) -> list[ComputeTime]:
    models: list[ComputeTime] = []
    for rank in range(n):
        a, c = rng.choice([0, 1]) * rng.uniform(0, 0.03), rng.uniform(3e-4, 3e-3)
        bent = StepCurve(sizes=(0, 16, 64, 128), times=(a, a + 16 * c, a + 64 * c, a + 192 * c))
        models.append(bent if curves and rank % 2 else StepTime(launch_s=a, sample_s=c))
    return models


def timed(prepare: Callable[[random.Random], Callable[[], object]]) -> tuple[float, float]:
    """Returns the median and the longest of the rounds, in seconds, the first left out."""
    times = []
    for seed in range(ROUNDS + 1):
        planned = prepare(random.Random(seed))
        start = time.perf_counter()
        planned()
        times.append(time.perf_counter() - start)
    return median(times[1:]), max(times[1:])


def split(n: int, *, curves: bool = False, granularity: int = 1) -> Callable[..., object]:
    def prepare(rng: random.Random) -> Callable[[], object]:
        models = random_models(rng, n, curves=curves)
        micro_batches = [rng.choice([16, 100, 10**9]) for _ in range(n)]
        total = rng.randrange(16 * n, 256 * n)
        return lambda: split_batch(
            models, total, micro_batches=micro_batches, floors=[1] * n, granularity=granularity
        )

    return prepare


def overlapped(n: int) -> Callable[..., object]:
    def prepare(rng: random.Random) -> Callable[[], object]:
        shares = [0.5, 0.6, 0.75, 0.9, 1.0]
        ranks = [
            BucketTimes.along(model, shares, batch=64, micro_batch=64)
            for model in random_models(rng, n)
        ]
        return lambda: split_overlapped(
            ranks, 64 * n, exchange_s=[5e-3] * 5, micro_batches=[64] * n, floors=[1] * n
        )

    return prepare


def decision(n: int, *, curves: bool = False) -> Callable[..., object]:
    def prepare(rng: random.Random) -> Callable[[], object]:
        models = random_models(rng, n, curves=curves)

        def window(batch: int) -> Window:
            seen = tuple(
                tuple(
                    Observation(
                        batch=batch,
                        micro_steps=1,
                        compute_s=model.seconds(batch, batch) * rng.gauss(1, 0.01),
                    )
                    for _ in range(WINDOW_STEPS)
                )
                for model in models
            )
            return Window(batches=(batch,) * n, micro_batches=(256,) * n, observations=seen)

        state = BalancerState()
        for batch in (16, 64, 128, 96):
            state, _ = decide(state, window(batch))
        last = window(96)
        return lambda: decide(state, last)

    return prepare


def verdict(n: int) -> Callable[..., object]:
    def prepare(rng: random.Random) -> Callable[[], object]:
        models, labels = random_models(rng, n), [str(rank) for rank in range(n)]
        return lambda: judge(labels, models, 64 * n, micro_batches=[64] * n, comm_s=5e-3)

    return prepare


def show(what: str, prepare: Callable[..., object], limit_s: float | None = None) -> float:
    middle, longest = timed(prepare)
    allowed = "" if limit_s is None else f", of {limit_s * 1e3:g} ms allowed"
    print(f"{what}: {middle * 1e3:.3f} ms, at most {longest * 1e3:.3f} ms{allowed}")
    return middle


def main() -> None:
    for n, limit_s in YARDSTICKS_S.items():
        show(f"split, {n} devices", split(n), limit_s)
        show(f"split, {n} devices, half of them curves", split(n, curves=True), limit_s)
        show(f"split, {n} devices, in units of 8", split(n, granularity=8))
        show(f"split, {n} devices, 5 buckets that overlap", overlapped(n))
    show("verdict, 6 devices", verdict(6))
    for curves, shapes in ((False, ""), (True, ", half of them curves")):
        what = f"balancer, one decision, 6 devices{shapes}"
        share = show(what, decision(6, curves=curves)) / (WINDOW_STEPS * STEP_S)
        print(
            f"  {share:.3%} of a step of {STEP_S * 1e3:.0f} ms, at one decision in "
            f"{WINDOW_STEPS} steps; 0.1% allowed"
        )


if __name__ == "__main__":
    main()
