"""The memory model, and the largest micro-batch."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.memory import MemoryModel, fit_memory, largest_micro_batch, shrink

PEAKS = st.lists(
    st.tuples(st.integers(1, 512), st.floats(0, 1e11)),
    min_size=2,
    max_size=8,
    unique_by=lambda row: row[0],
)


@given(st.integers(0, 2**33), st.integers(1, 2**24), st.integers(2**30, 2**37), st.floats(0, 0.5))
def test_the_largest_micro_batch_fits_and_one_more_does_not(
    fixed: int, sample: int, size: int, headroom: float
) -> None:
    model = MemoryModel(fixed_bytes=fixed, sample_bytes=sample)
    usable = size * (1 - headroom)
    if model.bytes(1) > usable:
        with pytest.raises(PlanError, match="not even one sample"):
            largest_micro_batch(model, size, headroom)
        return
    largest = largest_micro_batch(model, size, headroom)
    assert model.bytes(largest) <= usable * (1 + 1e-12)
    assert model.bytes(largest + 1) > usable * (1 - 1e-12)


def test_what_does_not_fit_says_what_it_needs() -> None:
    model = MemoryModel(fixed_bytes=3 * 2**30, sample_bytes=2**20)
    with pytest.raises(PlanError, match=r"needs 3\.001 GiB.*3 GiB for the model.*has 2 GiB"):
        largest_micro_batch(model, 2 * 2**30)


def test_samples_without_memory_know_no_bound() -> None:
    assert largest_micro_batch(MemoryModel(fixed_bytes=1, sample_bytes=0), 100) == sys.maxsize


@given(PEAKS)
def test_no_measured_peak_lies_above_the_model(peaks: list[tuple[int, float]]) -> None:
    model = fit_memory(peaks)
    assert all(model.bytes(size) >= peak * (1 - 1e-9) - 1e-6 for size, peak in peaks)


def test_two_peaks_are_met_exactly() -> None:
    assert fit_memory([(32, 1320), (8, 1080)]) == MemoryModel(fixed_bytes=1000, sample_bytes=10)


def test_peaks_that_fall_with_size_cost_nothing_per_sample() -> None:
    assert fit_memory([(8, 1100), (32, 1000)]) == MemoryModel(fixed_bytes=1100, sample_bytes=0)


def test_the_higher_of_two_peaks_of_one_size_counts() -> None:
    assert fit_memory([(8, 1080), (8, 900), (32, 1320)]).fixed_bytes == 1000


@pytest.mark.parametrize("peaks", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)]])
def test_one_size_is_not_enough(peaks: list[tuple[int, float]]) -> None:
    with pytest.raises(PlanError, match="two micro-batch sizes"):
        fit_memory(peaks)


@pytest.mark.parametrize("peak", [(0, 1.0), (4, -1.0), (4, float("nan"))])
def test_impossible_peaks_are_refused(peak: tuple[int, float]) -> None:
    with pytest.raises(PlanError, match="peaks need"):
        fit_memory([(8, 1.0), peak])


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 0"):
        MemoryModel(fixed_bytes=-1, sample_bytes=0)
    with pytest.raises(PlanError, match="headroom"):
        largest_micro_batch(MemoryModel(fixed_bytes=0, sample_bytes=1), 100, headroom=1.0)


@given(st.integers(2, 4096), st.integers(0, 2**33), st.integers(0, 2**24), st.floats(0, 0.9))
def test_the_cap_after_an_out_of_memory_is_smaller_but_not_by_more_than_half(
    failed: int, fixed: int, sample: int, headroom: float
) -> None:
    model = MemoryModel(fixed_bytes=fixed, sample_bytes=sample)
    for known in (None, model):
        assert failed // 2 <= shrink(known, failed, headroom) <= failed - 1


def test_the_cap_after_an_out_of_memory_leaves_the_headroom_of_what_failed() -> None:
    model = MemoryModel(fixed_bytes=200, sample_bytes=10)
    cap = shrink(model, 80)
    assert model.bytes(cap) <= 0.92 * model.bytes(80) < model.bytes(cap + 1)
    assert shrink(None, 80) == 40


@pytest.mark.parametrize("failed", [0, 1])
def test_a_sample_that_does_not_fit_cannot_shrink(failed: int) -> None:
    with pytest.raises(PlanError, match="cannot be made smaller"):
        shrink(None, failed)
