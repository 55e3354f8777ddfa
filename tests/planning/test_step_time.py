"""The fit of t(b) = ⌈b/μ⌉·a + c·b."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.step_time import (
    Observation,
    SizeMedian,
    StepTime,
    fit_medians,
    fit_step_time,
    medians,
)

LAUNCHES = st.floats(0, 0.1)
SLOPES = st.floats(1e-5, 1e-1)


def seen(model: StepTime, batch: int, micro_batch: int, *, noise: float = 1.0) -> Observation:
    return Observation(
        batch=batch,
        micro_steps=-(-batch // micro_batch),
        compute_s=model.seconds(batch, micro_batch) * noise,
    )


def test_a_partial_micro_batch_costs_a_whole_launch() -> None:
    model = StepTime(launch_s=0.5, sample_s=0.25)
    assert [model.seconds(b, 4) for b in (0, 1, 4, 5, 8, 9)] == [0, 0.75, 1.5, 2.25, 3.0, 3.75]


@given(LAUNCHES, SLOPES, st.integers(1, 200), st.integers(1, 200), st.integers(1, 64))
def test_two_exact_sizes_are_met(a: float, c: float, one: int, other: int, micro: int) -> None:
    model = StepTime(launch_s=a, sample_s=c)
    fitted = fit_step_time([seen(model, one, micro), seen(model, other, micro)])
    alike = max(one / -(-one // micro), other / -(-other // micro)) < 1.1 * min(
        one / -(-one // micro), other / -(-other // micro)
    )
    if not alike and c > 0.05 * min(model.seconds(b, micro) / b for b in (one, other)):
        for batch in (one, other):
            assert fitted.seconds(batch, micro) == pytest.approx(model.seconds(batch, micro))


def test_one_size_counts_as_proportional() -> None:
    fitted = fit_step_time([Observation(batch=8, micro_steps=1, compute_s=t) for t in (4, 2, 4)])
    assert fitted == StepTime(launch_s=0.0, sample_s=0.5)


def test_sizes_too_close_to_tell_apart_count_as_one() -> None:
    fitted = fit_step_time(
        [
            Observation(batch=100, micro_steps=1, compute_s=1.00),
            Observation(batch=102, micro_steps=1, compute_s=1.10),
        ]
    )
    assert fitted.launch_s == 0
    assert fitted.sample_s == pytest.approx(0.0104, rel=0.02)


def test_full_micro_batches_alone_cannot_tell_launch_from_sample() -> None:
    model = StepTime(launch_s=0.1, sample_s=0.01)
    fitted = fit_step_time([seen(model, batch, 16) for batch in (16, 32, 64)])
    assert fitted.launch_s == 0
    assert fitted.seconds(48, 16) == pytest.approx(model.seconds(48, 16))


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 10)), min_size=1, max_size=12))
def test_whatever_was_seen_the_model_is_a_step_time(rows: list[tuple[int, float]]) -> None:
    fitted = fit_step_time([Observation(batch=b, micro_steps=1, compute_s=t) for b, t in rows])
    assert fitted.launch_s >= 0
    assert fitted.sample_s > 0


def test_a_device_that_gets_faster_with_size_is_never_free_per_sample() -> None:
    fitted = fit_step_time(
        [
            Observation(batch=10, micro_steps=1, compute_s=1.0),
            Observation(batch=100, micro_steps=1, compute_s=0.9),
        ]
    )
    assert fitted.sample_s >= 0.05 * 0.9 / 100


def test_superlinear_times_do_not_give_a_negative_launch() -> None:
    fitted = fit_step_time(
        [
            Observation(batch=10, micro_steps=1, compute_s=1.0),
            Observation(batch=20, micro_steps=1, compute_s=4.0),
        ]
    )
    assert fitted.launch_s == 0
    assert 0.1 <= fitted.sample_s <= 0.2


def test_outliers_within_a_size_do_not_count() -> None:
    model = StepTime(launch_s=0.02, sample_s=0.002)
    rows = [seen(model, b, 512) for b in (16, 64) for _ in range(6)]
    rows += [seen(model, b, 512, noise=30) for b in (16, 64) for _ in range(5)]
    fitted = fit_step_time(rows)
    assert fitted.launch_s == pytest.approx(0.02)
    assert fitted.sample_s == pytest.approx(0.002)


def test_one_bad_size_among_many_bends_the_fit_little() -> None:
    model = StepTime(launch_s=0.02, sample_s=0.002)
    rows = [seen(model, b, 512) for b in (8, 16, 32, 64, 128)]
    fitted = fit_step_time([*rows, seen(model, 48, 512, noise=2)])
    for batch in (8, 64, 128):
        assert fitted.seconds(batch, 512) == pytest.approx(model.seconds(batch, 512), rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_two_percent_averages_out(seed: int) -> None:
    rng = random.Random(seed)
    model = StepTime(launch_s=0.02, sample_s=0.002)
    rows = [
        seen(model, b, 512, noise=1 + rng.gauss(0, 0.02)) for b in (8, 32, 128) for _ in range(20)
    ]
    fitted = fit_step_time(rows)
    for batch in (8, 50, 256):
        assert fitted.seconds(batch, 512) == pytest.approx(model.seconds(batch, 512), rel=0.03)


@given(LAUNCHES, SLOPES, st.integers(1, 100), st.floats(0.2, 5))
def test_through_meets_what_was_seen(a: float, c: float, batch: int, factor: float) -> None:
    model = StepTime(launch_s=a, sample_s=c)
    now = SizeMedian(
        batch=batch, micro_steps=1, seconds=model.seconds(batch, batch) * factor, count=5
    )
    moved = model.through(now)
    assert moved.seconds(batch, batch) == pytest.approx(now.seconds)
    assert moved.launch_s <= model.launch_s * max(1, factor) * (1 + 1e-9)


def test_medians_are_per_batch_and_micro_steps() -> None:
    rows = [
        Observation(batch=8, micro_steps=steps, compute_s=t)
        for steps, t in ((1, 1.0), (2, 5.0), (1, 3.0))
    ]
    assert [(m.micro_steps, m.seconds, m.count) for m in medians(rows)] == [
        (1, 2.0, 2),
        (2, 5.0, 1),
    ]


def test_no_observation_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one observation"):
        fit_step_time([])
    with pytest.raises(PlanError, match="at least one observation"):
        fit_medians([])


@pytest.mark.parametrize(
    ("batch", "steps", "seconds"), [(0, 1, 1.0), (4, 0, 1.0), (4, 5, 1.0), (4, 1, 0.0)]
)
def test_impossible_observations_are_refused(batch: int, steps: int, seconds: float) -> None:
    with pytest.raises(PlanError, match=r"observation|compute_s"):
        Observation(batch=batch, micro_steps=steps, compute_s=seconds)


@pytest.mark.parametrize(("a", "c"), [(-1e-9, 1.0), (0.0, 0.0), (float("nan"), 1.0), (0.0, 1e400)])
def test_impossible_step_times_are_refused(a: float, c: float) -> None:
    with pytest.raises(PlanError, match="launch_s"):
        StepTime(launch_s=a, sample_s=c)
