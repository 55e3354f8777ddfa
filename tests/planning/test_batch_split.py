"""The split: exact against brute force, and what it refuses."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.batch_split import (
    compute_spread,
    even_split,
    imbalance_floor,
    ratio_split,
    split_batch,
    step_seconds,
)
from hetkit.planning.curve import StepCurve
from hetkit.planning.step_time import ComputeTime, StepTime

Problem = tuple[list[ComputeTime], int, list[int], list[int], list[int]]


@st.composite
def curves(draw: st.DrawFn) -> StepCurve:
    sizes, times = [0.0], [draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 3))]
    steps = st.tuples(st.sampled_from([1.0, 2.0, 4.5]), st.sampled_from([0.5, 1.0, 7.0]))
    for width, height in draw(st.lists(steps, min_size=1, max_size=4)):
        sizes.append(sizes[-1] + width)
        times.append(times[-1] + height)
    return StepCurve(sizes=tuple(sizes), times=tuple(times))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 4))
    total = draw(st.integers(0, 12))
    # Few distinct values, so that ties and equal devices are common.
    launch = st.sampled_from([0.0, 0.5, 1.0, 3.0]) | st.floats(0, 5)
    sample = st.sampled_from([0.5, 1.0, 2.3]) | st.floats(0.01, 5)
    lines = st.builds(StepTime, launch_s=launch, sample_s=sample)
    models = [draw(lines | curves()) for _ in range(n)]
    micro_batches = [draw(st.integers(1, 12)) for _ in range(n)]
    floors = [draw(st.integers(0, 3)) for _ in range(n)]
    caps = [draw(st.integers(floor, 12)) for floor in floors]
    return models, total, micro_batches, floors, caps


def brute_force(
    models: Sequence[ComputeTime],
    total: int,
    micro_batches: Sequence[int],
    floors: Sequence[int],
    caps: Sequence[int],
) -> list[tuple[int, ...]]:
    ranges = [range(low, high + 1) for low, high in zip(floors, caps, strict=True)]
    return [split for split in itertools.product(*ranges) if sum(split) == total]


def finish_times(
    models: Sequence[ComputeTime], split: Sequence[int], micro_batches: Sequence[int]
) -> list[float]:
    rows = zip(models, split, micro_batches, strict=True)
    return sorted((model.seconds(b, micro) for model, b, micro in rows), reverse=True)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_no_split_is_faster(
    problem: Problem,
) -> None:
    models, total, micro_batches, floors, caps = problem
    possible = brute_force(*problem)
    if not possible:
        with pytest.raises(PlanError):
            split_batch(models, total, micro_batches=micro_batches, floors=floors, caps=caps)
        return
    split = split_batch(models, total, micro_batches=micro_batches, floors=floors, caps=caps)
    assert split in possible
    least_s = min(step_seconds(models, other, micro_batches) for other in possible)
    assert step_seconds(models, split, micro_batches) == least_s


@settings(max_examples=200, deadline=None)
@given(problems())
def test_no_rank_has_a_sample_that_another_would_finish_earlier(
    problem: Problem,
) -> None:
    models, total, micro_batches, floors, caps = problem
    if not sum(floors) <= total <= sum(caps):
        return
    split = split_batch(models, total, micro_batches=micro_batches, floors=floors, caps=caps)
    rows = list(zip(models, split, micro_batches, floors, caps, strict=True))
    last_s = max((m.seconds(b, micro) for m, b, micro, low, _ in rows if b > low), default=0.0)
    assert all(m.seconds(b + 1, micro) >= last_s for m, b, micro, _, high in rows if b < high)


def in_units(split: tuple[int, ...], unit: int) -> bool:
    """Whether all batches are multiples, but for one that takes what is left over on top."""
    rests = [batch % unit for batch in split if batch % unit]
    return rests == ([sum(split) % unit] if sum(split) % unit else [])


@settings(max_examples=400, deadline=None)
@given(problems(), st.integers(2, 5))
def test_no_split_in_units_is_faster(problem: Problem, unit: int) -> None:
    models, total, micro_batches, floors, caps = problem
    possible = [split for split in brute_force(*problem) if in_units(split, unit)]
    bounds = {"micro_batches": micro_batches, "floors": floors, "caps": caps}
    if not possible:
        with pytest.raises(PlanError):
            split_batch(models, total, granularity=unit, **bounds)
        return
    split = split_batch(models, total, granularity=unit, **bounds)
    assert split in possible
    least_s = min(step_seconds(models, other, micro_batches) for other in possible)
    assert step_seconds(models, split, micro_batches) == least_s


def test_what_is_left_over_goes_where_it_costs_least() -> None:
    models = [StepTime(launch_s=0, sample_s=3.0), StepTime(launch_s=0, sample_s=1.0)]
    assert split_batch(models, 67, micro_batches=[64, 64], granularity=16) == (16, 51)


@pytest.mark.parametrize("n", [64, 1000])
def test_a_large_fleet_of_all_shapes_in_units_is_even(n: int) -> None:
    rng = random.Random(n)
    models: list[ComputeTime] = []
    for rank in range(n):
        a, c = rng.uniform(0, 0.05), rng.uniform(1e-4, 0.01)
        line = StepTime(launch_s=a, sample_s=c)
        bent = StepCurve(sizes=(0, 32, 96), times=(a, a + 32 * c, a + 192 * c))
        models.append(bent if rank % 2 else line)
    micro_batches, total = [128] * n, 200 * n + 3
    split = split_batch(models, total, micro_batches=micro_batches, granularity=8)
    assert sum(split) == total
    assert in_units(split, 8)
    rows = list(zip(models, split, micro_batches, strict=True))
    whole = [(m, b, micro) for m, b, micro in rows if b % 8 == 0]
    last_s = max(m.seconds(b, micro) for m, b, micro in whole)
    assert all(m.seconds(b + 8, micro) >= last_s for m, b, micro in whole)


@pytest.mark.parametrize("seed", range(20))
def test_large_splits_cannot_be_improved_by_moving_one_sample(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice([6, 16, 64])
    models = [
        StepTime(
            launch_s=rng.choice([0, 1]) * rng.uniform(0, 0.05), sample_s=rng.uniform(1e-4, 0.01)
        )
        for _ in range(n)
    ]
    micro_batches = [rng.choice([1, 16, 100, 10**9]) for _ in range(n)]
    total = rng.randrange(n, 300 * n)
    split = split_batch(models, total, micro_batches=micro_batches, floors=[1] * n)
    assert sum(split) == total
    rows = list(zip(models, split, micro_batches, strict=True))
    last_s = max(model.seconds(b, micro) for model, b, micro in rows if b > 1)
    assert all(model.seconds(b + 1, micro) >= last_s for model, b, micro in rows)


def test_the_bound_of_two_unlike_devices_is_reached() -> None:
    fast, slow = StepTime(launch_s=0, sample_s=1.0), StepTime(launch_s=0, sample_s=2.3)
    even_s = step_seconds([fast, slow], even_split(256, 2), [256, 256])
    best_s = step_seconds(
        [fast, slow], split_batch([fast, slow], 256, micro_batches=[256] * 2), [256] * 2
    )
    assert even_s / best_s >= 0.99 * 1.65


def test_like_devices_get_an_even_split() -> None:
    models = [StepTime(launch_s=0.01, sample_s=0.001)] * 4
    assert split_batch(models, 10, micro_batches=[8] * 4) == even_split(10, 4)


def test_a_device_too_slow_to_help_gets_nothing_unless_its_floor_says_so() -> None:
    models = [StepTime(launch_s=0, sample_s=1.0), StepTime(launch_s=50.0, sample_s=1.0)]
    assert split_batch(models, 20, micro_batches=[32, 32]) == (20, 0)
    assert split_batch(models, 20, micro_batches=[32, 32], floors=[1, 1]) == (19, 1)


def test_a_cap_passes_the_rest_on() -> None:
    models = [StepTime(launch_s=0, sample_s=1.0), StepTime(launch_s=0, sample_s=2.0)]
    assert split_batch(models, 90, micro_batches=[90, 90], caps=[10, 90]) == (10, 80)


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"caps": [10, 10]}, "0 to 20.*nearest is 20"),
        ({"granularity": 0}, "granularity"),
        ({"caps": [13, 91], "granularity": 20}, "0 to 80 in whole units"),
        ({"floors": [17, 0], "caps": [19, 99], "granularity": 8}, "rank 0 has no batch between"),
        ({"caps": [30, 72], "granularity": 16}, "left over on one rank"),
        ({"floors": [60, 60]}, "120 to 200"),
        ({"floors": [5, 1], "caps": [4, 100]}, "rank 0 must take at least 5"),
        ({"floors": [-1, 1]}, "floors"),
        ({"floors": [1]}, "1 floors"),
        ({"micro_batches": [0, 1]}, "micro_batches"),
    ],
)
def test_what_cannot_be_says_what_could(bounds: dict[str, list[int]], told: str) -> None:
    models = [StepTime(launch_s=0, sample_s=1.0)] * 2
    with pytest.raises(PlanError, match=told):
        split_batch(models, 100, **{"micro_batches": [8, 8], **bounds})


def test_no_models_are_refused() -> None:
    with pytest.raises(PlanError, match="at least one"):
        split_batch([], 4, micro_batches=[])


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_even_split_is_even(total: int, n: int) -> None:
    split = even_split(total, n)
    assert sum(split) == total
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


@given(
    st.lists(st.floats(0, 1e6) | st.integers(0, 1000), min_size=1, max_size=16),
    st.integers(0, 5000),
)
def test_ratio_split_is_within_one_of_its_quota(ratios: list[float], total: int) -> None:
    if not any(ratios):
        return
    split = ratio_split(ratios, total)
    assert sum(split) == total
    for part, ratio in zip(split, ratios, strict=True):
        assert abs(part - total * ratio / sum(ratios)) < 1 + 1e-6
        assert ratio > 0 or part == 0


def test_ratio_split_of_a_plans_batches_keeps_them() -> None:
    assert ratio_split((178, 78), 256) == (178, 78)
    assert ratio_split((178, 78), 1) == (1, 0)
    assert ratio_split((1, 1, 1), 2) == (1, 1, 0)


@pytest.mark.parametrize("ratios", [[], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_ratios_that_divide_nothing_are_refused(ratios: list[float]) -> None:
    with pytest.raises(PlanError, match="ratios"):
        ratio_split(ratios, 10)


@pytest.mark.parametrize(("total", "n"), [(4, 0), (-1, 2)])
def test_even_split_refuses_nonsense(total: int, n: int) -> None:
    with pytest.raises(PlanError, match="cannot split"):
        even_split(total, n)


@pytest.mark.parametrize("seed", range(10))
def test_the_spread_of_large_batches_comes_down_to_the_floor(seed: int) -> None:
    rng = random.Random(seed)
    models = [StepTime(launch_s=0.01, sample_s=rng.uniform(1e-3, 4e-3)) for _ in range(6)]
    micro_batches = [4096] * 6
    split = split_batch(models, 512, micro_batches=micro_batches)
    spread = compute_spread(finish_times(models, split, micro_batches))
    assert spread is not None
    assert spread <= imbalance_floor(models, split, micro_batches) + 1e-12


def test_ranks_without_work_or_reading_are_left_out_of_the_spread() -> None:
    assert compute_spread([2.0, None, 1.0, 0.0]) == 0.5
    assert compute_spread([3.0]) == 0.0
    assert compute_spread([0.0, None]) is None
    assert imbalance_floor([StepTime(launch_s=0, sample_s=1.0)], [0]) == 0.0
