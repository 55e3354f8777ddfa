import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.records.columns import Columns, group_means, group_starts

VALUES = st.floats(-1e6, 1e6)


def filled(values: list[float], capacity: int) -> Columns:
    columns = Columns(["step", "value", "peak"], capacity=capacity, last=["step"], peak=["peak"])
    for step, value in enumerate(values):
        columns.append([step, value, value])
    return columns


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(4, 33))
def test_thinning_is_bounded_ordered_and_keeps_the_newest_exact(values, capacity):
    columns = filled(values, capacity)
    assert 1 <= len(columns) <= capacity
    steps = columns["step"]
    assert np.all(np.diff(steps) > 0)
    newest = min(len(values), capacity - capacity // 2)
    assert columns["value"][-newest:].tolist() == values[-newest:]
    assert columns.counts[-newest:].tolist() == [1.0] * newest


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(4, 33))
def test_thinning_keeps_the_mean_the_largest_and_the_number_of_rows(values, capacity):
    columns = filled(values, capacity)
    counts = columns.counts
    assert counts.sum() == len(values)
    assert columns["peak"].max() == max(values)
    total = float(counts @ columns["value"])
    assert math.isclose(total, math.fsum(values), rel_tol=1e-9, abs_tol=1e-4)


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(4, 33))
def test_each_point_is_the_mean_of_its_own_rows_and_stands_at_the_last(values, capacity):
    columns = filled(values, capacity)
    ends = np.cumsum(columns.counts).astype(int)
    assert columns["step"].tolist() == [end - 1 for end in ends]
    starts = np.concatenate([[0], ends[:-1]])
    means = [float(np.mean(values[a:b])) for a, b in zip(starts, ends, strict=True)]
    np.testing.assert_allclose(columns["value"], means, rtol=1e-9, atol=1e-6)


def test_a_long_run_is_covered_evenly():
    columns = filled([0.0] * 50_000, capacity=200)
    old = columns.counts[: len(columns) - 100]
    assert len(old) >= 25
    # All but the last of the merged points, which is still filling up, are alike.
    wide = old[old > 1]
    assert set(wide[:-1]) == {wide[0]}


def test_missing_readings_take_no_part_and_stay_missing_together():
    means = group_means(
        np.array([[1.0, np.nan], [np.nan, np.nan], [5.0, 2.0], [np.inf, 4.0]]),
        np.array([1.0, 1.0, 1.0, 3.0]),
        np.array([0, 2]),
    )
    np.testing.assert_array_equal(means, [[1.0, np.nan], [np.inf, 3.5]])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_groups_are_few_and_begin_at_the_first_point(counts, most):
    starts = group_starts(np.array(counts, dtype=float), most=most)
    assert starts[0] == 0
    assert len(starts) <= most
    assert np.all(np.diff(starts) > 0)


def test_dropping_takes_the_newest_points_only():
    columns = filled([float(value) for value in range(10)], capacity=20)
    columns.drop_from(7)
    assert columns["step"].tolist() == list(range(7))
    columns.drop_from(100)
    assert len(columns) == 7


def test_a_column_is_a_copy():
    columns = filled([1.0, 2.0], capacity=4)
    columns["value"][0] = 99.0
    assert columns["value"].tolist() == [1.0, 2.0]


def test_too_small_a_capacity_is_refused():
    with pytest.raises(ValueError, match="at least 4 points, not 3"):
        Columns(["step"], capacity=3)
