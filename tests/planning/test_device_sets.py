"""Which sets of devices are tried, and that the best of them is found."""

import itertools
import random

import pytest

from hetkit.planning.batch_split import split_batch, step_seconds
from hetkit.planning.curve import StepCurve
from hetkit.planning.device_sets import DeviceSets
from hetkit.planning.step_time import StepTime


def brute_force_s(devices: DeviceSets) -> float:
    times = []
    n = len(devices.models)
    for count in range(1, n + 1):
        micro = [devices.total] * count
        for ranks in itertools.combinations(range(n), count):
            models = [devices.models[rank] for rank in ranks]
            split = split_batch(models, devices.total, micro_batches=micro, floors=[1] * count)
            times.append(step_seconds(models, split, micro) + devices.exchange_s(count))
    return min(times)


@pytest.mark.parametrize(("n", "seed"), [*((6, s) for s in range(12)), *((9, s) for s in range(4))])
def test_the_best_set_of_unlike_devices_is_found(n: int, seed: int) -> None:
    rng = random.Random(seed)
    each_s = rng.uniform(0, 0.02)
    devices = DeviceSets(
        models=tuple(
            StepTime(launch_s=rng.uniform(0, 0.05), sample_s=rng.uniform(3e-4, 3e-3))
            for _ in range(n)
        ),
        total=64,
        micro_batches=(64,) * n,
        caps=(64,) * n,
        exchange_s=lambda ranks: each_s * ranks if ranks > 1 else 0.0,
    )
    best = devices.fastest()
    assert best is not None
    assert best.step_s <= (1 + 1e-9 if n == 6 else 1.04) * brute_force_s(devices)


def test_devices_with_other_bounds_are_not_of_one_class() -> None:
    devices = DeviceSets(
        models=(StepTime(launch_s=0.01, sample_s=1e-3),) * 2,
        total=64,
        micro_batches=(4, 64),
        caps=(64, 64),
        exchange_s=lambda ranks: 10.0 if ranks > 1 else 0.0,
    )
    best = devices.fastest()
    assert best is not None
    assert best.ranks == (1,)


def test_nothing_fits_is_no_choice() -> None:
    devices = DeviceSets(
        models=(StepTime(launch_s=0.0, sample_s=1.0),) * 2,
        total=64,
        micro_batches=(8, 8),
        caps=(8, 8),
        exchange_s=lambda ranks: 0.0,
    )
    assert devices.fastest() is None
    assert devices.alone() is None
    assert devices.even("even") is None
    assert devices.balanced("none", []) is None


def test_sets_of_bent_devices_are_compared_by_their_curves() -> None:
    bent = StepCurve(sizes=(0, 16, 64), times=(0.0, 0.016, 0.256))
    devices = DeviceSets(
        models=(StepTime(launch_s=0.0, sample_s=0.003), bent),
        total=64,
        micro_batches=(64, 64),
        caps=(64, 64),
        exchange_s=lambda ranks: 0.0,
    )
    best = devices.fastest()
    assert best is not None
    assert (best.ranks, best.batches) == ((0, 1), (32, 32))
    assert best.step_s == pytest.approx(0.096)
    alone = devices.alone()
    assert alone is not None
    assert alone.ranks == (0,)
