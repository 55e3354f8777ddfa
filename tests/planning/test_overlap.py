"""The overlapped step: its formula, and that no other split is faster."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.batch_split import split_batch
from hetkit.planning.overlap import BucketTimes, overlapped_seconds, split_overlapped
from hetkit.planning.step_time import StepTime


@st.composite
def buckets(draw: st.DrawFn, count: int) -> BucketTimes:
    sample = sorted(draw(st.sampled_from([0.5, 1.0]) | st.floats(0.01, 3)) for _ in range(count))
    fixed = [draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 3)) for _ in range(count)]
    return BucketTimes(fixed_s=tuple(fixed), sample_s=tuple(sample))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[BucketTimes], list[float], list[int], list[int], int]:
    n, count = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = [draw(buckets(count)) for _ in range(n)]
    exchange_s = [draw(st.sampled_from([0.0, 2.0]) | st.floats(0, 5)) for _ in range(count)]
    micro_batches = [draw(st.integers(1, 12)) for _ in range(n)]
    caps = [draw(st.integers(0, 12)) for _ in range(n)]
    return ranks, exchange_s, micro_batches, caps, draw(st.integers(0, sum(caps)))


def by_formula(
    ranks: list[BucketTimes], split: tuple[int, ...], micro: list[int], exchange_s: list[float]
) -> float:
    """DESIGN.md §6, word for word: bucket by bucket, as the link sees it."""
    ready = [rank.ready_s(b, m) for rank, b, m in zip(ranks, split, micro, strict=True)]
    link_s = 0.0
    for k, transfer_s in enumerate(exchange_s):
        link_s = max(link_s, *(row[k] for row in ready)) + transfer_s
    return link_s


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_split_is_faster(
    problem: tuple[list[BucketTimes], list[float], list[int], list[int], int],
) -> None:
    ranks, exchange_s, micro, caps, total = problem
    split = split_overlapped(ranks, total, exchange_s=exchange_s, micro_batches=micro, caps=caps)
    ranges = (range(cap + 1) for cap in caps)
    possible = [other for other in itertools.product(*ranges) if sum(other) == total]
    assert split in possible
    least_s = min(by_formula(ranks, other, micro, exchange_s) for other in possible)
    assert by_formula(ranks, split, micro, exchange_s) == pytest.approx(least_s, rel=1e-9)
    step_s = overlapped_seconds(ranks, split, exchange_s=exchange_s, micro_batches=micro)
    assert step_s == pytest.approx(least_s, rel=1e-9)


@given(buckets(3), st.integers(1, 12))
def test_more_samples_are_never_ready_earlier(rank: BucketTimes, micro_batch: int) -> None:
    rows = [rank.ready_s(batch, micro_batch) for batch in range(40)]
    for before, after in itertools.pairwise(rows):
        assert all(a <= b + 1e-9 for a, b in zip(before, after, strict=True))


def test_without_exchange_the_split_is_that_of_the_compute() -> None:
    models = [StepTime(launch_s=0.5, sample_s=1.0), StepTime(launch_s=0.25, sample_s=2.5)]
    ranks = [BucketTimes.along(m, [0.5, 1.0], batch=20, micro_batch=64) for m in models]
    split = split_overlapped(ranks, 60, exchange_s=[0, 0], micro_batches=[64, 64])
    assert split == split_batch(models, 60, micro_batches=[64, 64])


def test_a_rank_whose_first_bucket_is_late_gets_less_than_by_its_compute() -> None:
    early = BucketTimes(fixed_s=(0.0, 0.0), sample_s=(0.4, 1.0))
    late = BucketTimes(fixed_s=(0.0, 0.0), sample_s=(1.0, 1.0))
    split = split_overlapped([early, late], 60, exchange_s=[30.0, 1.0], micro_batches=[64, 64])
    assert split[0] > split[1]


def test_the_optimizer_is_added() -> None:
    rank = BucketTimes(fixed_s=(1.0,), sample_s=(1.0,))
    step_s = overlapped_seconds([rank], [4], exchange_s=[2.0], micro_batches=[2], optimizer_s=0.5)
    assert step_s == 2 * (1 + 2) + 2 + 0.5


def test_a_curve_counts_as_its_tangent() -> None:
    device = StepTime(launch_s=2.0, sample_s=1.0)
    times = BucketTimes.along(device, [0.25, 1.0], batch=16, micro_batch=8)
    assert times.ready_s(16, 8)[-1] == device.seconds(16, 8)


@pytest.mark.parametrize(
    ("fixed", "sample"),
    [
        ((), ()),
        ((0.0,), (1.0, 2.0)),
        ((-1.0,), (1.0,)),
        ((0.0,), (0.0,)),
        ((0.0, 0.0), (2.0, 1.0)),
        ((0.0,), (float("inf"),)),
    ],
)
def test_impossible_buckets_are_refused(
    fixed: tuple[float, ...], sample: tuple[float, ...]
) -> None:
    with pytest.raises(PlanError, match="bucket"):
        BucketTimes(fixed_s=fixed, sample_s=sample)


@pytest.mark.parametrize("exchange_s", [[1.0], [1.0, -1.0], [1.0, float("nan")]])
def test_exchanges_that_do_not_fit_are_refused(exchange_s: list[float]) -> None:
    rank = BucketTimes(fixed_s=(0.0, 0.0), sample_s=(1.0, 2.0))
    with pytest.raises(PlanError, match="per bucket"):
        split_overlapped([rank], 4, exchange_s=exchange_s, micro_batches=[4])
