"""The rising curve: what it goes through, when it takes a line's place, and that it only rises."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.batch_split import step_seconds
from hetkit.planning.curve import StepCurve, fit_curve, fit_model
from hetkit.planning.pace import Pace
from hetkit.planning.step_time import Observation, SizeMedian, StepTime

RISES = st.lists(st.tuples(st.floats(0.5, 20), st.floats(1e-3, 3)), min_size=1, max_size=5)


@st.composite
def curves(draw: st.DrawFn) -> StepCurve:
    sizes, times = [0.0], [draw(st.sampled_from([0.0, 0.5]) | st.floats(0, 2))]
    for width, height in draw(RISES):
        sizes.append(sizes[-1] + width)
        times.append(times[-1] + height)
    return StepCurve(sizes=tuple(sizes), times=tuple(times))


def at(batch: int, seconds: float, *, micro_steps: int = 1, count: int = 5) -> SizeMedian:
    return SizeMedian(batch=batch, micro_steps=micro_steps, seconds=seconds, count=count)


@given(curves(), st.integers(1, 30))
def test_more_samples_never_take_less_time(curve: StepCurve, micro_batch: int) -> None:
    times = [curve.seconds(batch, micro_batch) for batch in range(100)]
    assert times[0] == 0
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


@given(curves(), st.integers(1, 30), st.floats(0, 60))
def test_the_samples_within_a_time_are_the_most(
    curve: StepCurve, micro_batch: int, step_s: float
) -> None:
    batch = curve.samples_within(step_s, micro_batch)
    assert batch >= 0
    # One off by rounding at most, and then by no more than rounding.
    assert curve.seconds(batch, micro_batch) <= step_s * (1 + 1e-9) + 1e-9
    assert curve.seconds(batch + 1, micro_batch) >= step_s * (1 - 1e-9) - 1e-9


@given(curves(), st.integers(1, 60), st.integers(1, 30), st.floats(0.2, 5))
def test_through_meets_what_was_seen_and_scales_the_rest(
    curve: StepCurve, batch: int, micro_batch: int, factor: float
) -> None:
    steps = -(-batch // micro_batch)
    seen = at(batch, curve.seconds_in(batch, steps) * factor, micro_steps=steps)
    moved = curve.through(seen)
    assert moved.seconds_in(batch, steps) == pytest.approx(seen.seconds)
    assert moved.seconds(7, 3) == pytest.approx(factor * curve.seconds(7, 3))


@given(curves(), st.integers(1, 60))
def test_the_last_sample_costs_the_slope(curve: StepCurve, batch: int) -> None:
    cost_s = curve.sample_s_at(batch, 1000)
    assert cost_s > 0
    points = zip(curve.sizes, curve.times, strict=True)
    pieces = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairwise(points)]
    assert cost_s in pieces


def test_rising_medians_are_met_exactly_and_the_last_slope_goes_on() -> None:
    curve = fit_curve([at(32, 6.0), at(8, 1.0), at(16, 2.0)])
    assert [curve.seconds(b, 1000) for b in (4, 8, 16, 24, 32, 48)] == [0.5, 1, 2, 4, 6, 10]


def test_before_the_first_size_its_slope_goes_back_to_the_fixed_cost() -> None:
    assert fit_curve([at(10, 3.0), at(20, 4.0), at(30, 9.0)]).times[0] == pytest.approx(2.0)
    assert fit_curve([at(10, 1.0), at(20, 4.0)]).times[0] == 0


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 10)), min_size=1, max_size=8))
def test_whatever_was_seen_the_curve_rises(rows: list[tuple[int, float]]) -> None:
    curve = fit_curve([at(batch, seconds) for batch, seconds in rows])
    assert curve.sample_s_at(600, 1000) > 0


def test_medians_that_fall_are_pooled() -> None:
    curve = fit_curve([at(10, 1.0), at(20, 3.0), at(40, 2.0), at(80, 8.0)])
    assert 2 < curve.seconds(20, 100) <= curve.seconds(40, 100) < 3
    assert curve.seconds(80, 100) == pytest.approx(8.0)


def test_sizes_close_to_each_other_make_one_bend() -> None:
    curve = fit_curve([at(50, 1.00), at(51, 1.05), at(100, 3.0)])
    assert curve.sizes == (0, 50.5, 100)


def test_passes_count_by_their_own_size() -> None:
    curve = fit_curve([at(20, 2.0, micro_steps=2), at(40, 8.0), at(80, 30.0)])
    assert curve.seconds(10, 100) == pytest.approx(1.0)
    assert curve.seconds(20, 10) == pytest.approx(2.0)


def test_a_line_stays_a_line() -> None:
    model = StepTime(launch_s=0.02, sample_s=0.002)
    seen = [at(b, model.seconds(b, b) * f) for b, f in [(8, 1.02), (16, 0.98), (32, 1.02)]]
    assert isinstance(fit_model(seen), StepTime)


def test_two_sizes_are_a_line_however_bent() -> None:
    assert isinstance(fit_model([at(8, 1.0), at(64, 100.0)]), StepTime)


def test_a_bend_that_no_line_meets_makes_a_curve() -> None:
    seen = [at(8, 1.0), at(16, 2.0), at(32, 6.0)]
    assert isinstance(fit_model(seen), StepCurve)
    assert isinstance(fit_model(seen, noise=lambda: 0.5), StepTime)


def test_a_curve_foretells_a_bent_device_better_than_a_line() -> None:
    truth = StepCurve(sizes=(0, 16, 64, 128), times=(0.01, 0.02, 0.04, 0.14))
    seen = [at(b, truth.seconds(b, 512)) for b in (16, 64, 128)]
    fitted = fit_model(seen)
    assert isinstance(fitted, StepCurve)
    assert step_seconds([fitted], [100], [512]) == pytest.approx(truth.seconds(100, 512))


def test_a_pace_is_a_curve_once_three_sizes_are_off_the_line() -> None:
    truth = StepCurve(sizes=(0, 16, 64, 128), times=(0.01, 0.02, 0.04, 0.14))
    pace = Pace()
    for batch in (16, 64, 128):
        seen = Observation(batch=batch, micro_steps=1, compute_s=truth.seconds(batch, 512))
        pace = pace.take([seen] * 5)
    model = pace.model()
    assert isinstance(model, StepCurve)
    for batch in (16, 64, 100, 128):
        assert model.seconds(batch, 512) == pytest.approx(truth.seconds(batch, 512), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_makes_no_curve(seed: int) -> None:
    rng = random.Random(seed)
    model = StepTime(launch_s=0.02, sample_s=0.002)
    pace = Pace()
    for batch in (16, 64, 128):
        pace = pace.take(
            [
                Observation(
                    batch=batch,
                    micro_steps=1,
                    compute_s=model.seconds(batch, batch) * (1 + 0.1 * rng.gauss(0, 1)),
                )
                for _ in range(10)
            ]
        )
    assert isinstance(pace.model(), StepTime)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ((0.0,), (1.0,)),
        ((0.0, 1.0), (1.0,)),
        ((1.0, 2.0), (1.0, 2.0)),
        ((0.0, 1.0), (2.0, 2.0)),
        ((0.0, 1.0, 1.0), (1.0, 2.0, 3.0)),
        ((0.0, 1.0), (-1.0, 2.0)),
        ((0.0, 1.0), (1.0, float("inf"))),
    ],
)
def test_what_does_not_rise_is_refused(sizes: tuple[float, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="bends"):
        StepCurve(sizes=sizes, times=times)


def test_nothing_seen_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one observation"):
        fit_curve([])
    with pytest.raises(PlanError, match="at least one observation"):
        fit_model([])
