"""What is remembered of a rank, and how a change of its pace is noticed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.planning.pace import Pace, SizeTimes
from hetkit.planning.step_time import Observation, StepTime

MODEL = StepTime(launch_s=0.02, sample_s=0.002)


def window(
    model: StepTime, batch: int, *, count: int = 5, noise: float = 0.0, seed: int = 0
) -> list[Observation]:
    rng = random.Random(seed)
    return [
        Observation(
            batch=batch,
            micro_steps=1,
            compute_s=model.seconds(batch, batch) * (1 + noise * rng.gauss(0, 1)),
        )
        for _ in range(count)
    ]


def seconds(pace: Pace, batch: int) -> float:
    model = pace.model()
    assert model is not None
    return model.seconds(batch, batch)


def test_nothing_seen_is_no_model() -> None:
    assert Pace().model() is None
    assert Pace().at(8, 1) is None
    assert Pace().error(5) == 0.0


def test_two_sizes_make_the_model_affine() -> None:
    model = Pace().take(window(MODEL, 50)).take(window(MODEL, 100)).model()
    assert model is not None
    assert model.launch_s == pytest.approx(MODEL.launch_s)
    assert model.sample_s == pytest.approx(MODEL.sample_s)


def test_the_model_goes_through_the_size_that_runs_now() -> None:
    bent = StepTime(launch_s=0.02, sample_s=0.0021)
    pace = Pace().take(window(MODEL, 50)).take(window(MODEL, 100)).take(window(bent, 150))
    assert seconds(pace, 150) == pytest.approx(bent.seconds(150, 150))


def test_a_slower_card_is_followed_at_every_size_after_one_window() -> None:
    slow = StepTime(launch_s=0.02, sample_s=0.003)
    pace = Pace().take(window(MODEL, 50)).take(window(MODEL, 100)).take(window(slow, 100))
    for batch in (25, 50, 100, 200):
        assert seconds(pace, batch) == pytest.approx(slow.seconds(batch, batch))


def test_a_slower_card_is_noticed_at_a_new_size_too() -> None:
    slow = StepTime(launch_s=0.02, sample_s=0.003)
    pace = Pace().take(window(MODEL, 50)).take(window(MODEL, 100)).take(window(slow, 75))
    for batch in (50, 75, 100):
        assert seconds(pace, batch) == pytest.approx(slow.seconds(batch, batch))


def test_a_card_that_recovers_is_followed_back() -> None:
    slow = StepTime(launch_s=0.02, sample_s=0.003)
    pace = Pace().take(window(MODEL, 50)).take(window(MODEL, 100))
    pace = pace.take(window(slow, 100)).take(window(MODEL, 100))
    assert seconds(pace, 200) == pytest.approx(MODEL.seconds(200, 200))


def test_a_second_size_that_is_off_is_the_fixed_cost_and_not_drift() -> None:
    pace = Pace().take(window(MODEL, 10)).take(window(MODEL, 100))
    assert {size.batch: len(size.times) for size in pace.sizes} == {10: 5, 100: 5}
    model = pace.model()
    assert model is not None
    assert model.launch_s == pytest.approx(0.02)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_drift(seed: int) -> None:
    pace = Pace()
    for turn in range(4):
        pace = pace.take(window(MODEL, 100, noise=0.02, seed=100 * seed + turn))
    assert [len(size.times) for size in pace.sizes] == [20]


def test_one_odd_step_of_another_size_does_not_spoil_the_model() -> None:
    pace = Pace().take(window(MODEL, 100))
    slow_last_step = Observation(batch=20, micro_steps=1, compute_s=5.0)
    pace = pace.take([*window(MODEL, 100, count=4), slow_last_step])
    assert seconds(pace, 100) == pytest.approx(MODEL.seconds(100, 100))
    assert pace.sizes[-1].batch == 100


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 10)), max_size=60))
def test_the_memory_is_bounded(steps: list[tuple[int, float]]) -> None:
    pace = Pace()
    for batch, compute_s in steps:
        pace = pace.take([Observation(batch=batch, micro_steps=1, compute_s=compute_s)] * 3)
    assert len(pace.sizes) <= 4
    assert all(len(size.times) <= 20 for size in pace.sizes)
    if steps:
        assert pace.at(steps[-1][0], 1) is pace.sizes[-1]


def test_the_sizes_that_tell_most_are_kept() -> None:
    pace = Pace()
    for batch in (10, 200, 50, 51, 52, 53, 54):
        pace = pace.take(window(MODEL, batch))
    assert [size.batch for size in pace.sizes] == [10, 200, 53, 54]


def test_the_standard_error_is_that_of_a_median() -> None:
    pace = Pace().take(window(MODEL, 100, count=20, noise=0.02, seed=3))
    assert pace.error(20) == pytest.approx(0.02 * (3.14159 / 40) ** 0.5, rel=0.5)
    assert pace.error(5) == pytest.approx(2 * pace.error(20))


def test_outliers_hardly_widen_the_error() -> None:
    times = (*(1.0 + 0.001 * i for i in range(15)), 9.0, 9.0)
    assert Pace(sizes=(SizeTimes(batch=8, micro_steps=1, times=times),)).error(17) < 0.01
