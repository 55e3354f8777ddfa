"""The split of a step: its parts, from stamps that were made up to be read by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.planning.time_split import Stamps, TimeSplit, split_step


def parts(split: TimeSplit) -> float:
    return (
        split.data_s
        + split.compute_s
        + split.wait_s
        + split.transfer_s
        + split.codec_s
        + split.optimizer_s
        + split.other_s
    )


def test_the_fast_rank_waits_and_both_transfer() -> None:
    fast = Stamps(start=0, end=10, cut=4, data_s=1, optimizer_s=1, collectives=((4, 9),))
    slow = Stamps(start=0, end=10, cut=7, data_s=1, optimizer_s=1, collectives=((7, 9),))
    one, two = split_step([fast, slow])
    assert (one.compute_s, one.wait_s, one.transfer_s, one.other_s) == (3, 3, 2, 0)
    assert (two.compute_s, two.wait_s, two.transfer_s, two.other_s) == (6, 0, 2, 0)
    assert (one.comm_share, two.comm_share) == (0.5, 0.2)


def test_what_ran_beside_the_backward_is_not_added() -> None:
    stamps = Stamps(
        start=0, end=10, cut=6, data_s=0, optimizer_s=1, collectives=((2, 4), (5, 7), (7, 9))
    )
    for split in split_step([stamps, stamps]):
        assert split.overlapped_s == 3
        assert split.transfer_s == 3
        assert split.wait_s == 0
        assert split.compute_s == 6


def test_waiting_before_the_cut_costs_nothing() -> None:
    early = Stamps(start=0, end=10, cut=8, data_s=0, optimizer_s=1, collectives=((2, 6), (8, 9)))
    late = Stamps(start=0, end=10, cut=8, data_s=0, optimizer_s=1, collectives=((5, 6), (8, 9)))
    one, two = split_step([early, late])
    assert one.wait_s == two.wait_s == 0
    assert (one.overlapped_s, two.overlapped_s) == (4, 1)


def test_a_lone_rank_has_nothing_to_wait_for() -> None:
    (split,) = split_step([Stamps(start=1, end=3, cut=2.5, data_s=0.25, optimizer_s=0.5)])
    assert split.comm_share == 0
    assert split.compute_s == 1.25
    assert split.other_s == 0


def test_clocks_that_differ_a_little_give_no_negative_wait() -> None:
    """A stamp of an arrival that lies after another rank's end cannot be: it counts up to it."""
    one = Stamps(start=0, end=5, cut=2, data_s=0, optimizer_s=0, collectives=((2, 4),))
    two = Stamps(start=0, end=5, cut=4.5, data_s=0, optimizer_s=0, collectives=((4.5, 5),))
    for split in split_step([one, two]):
        assert min(split.wait_s, split.transfer_s, split.overlapped_s) >= 0
    assert split_step([one, two])[0].wait_s == 2


def test_ranks_with_other_numbers_of_collectives_are_refused() -> None:
    one = Stamps(start=0, end=1, cut=1, data_s=0, optimizer_s=0, collectives=((0, 1),))
    two = Stamps(start=0, end=1, cut=1, data_s=0, optimizer_s=0)
    with pytest.raises(ValueError, match=r"different numbers of collectives: \[0, 1\]"):
        split_step([one, two])


def test_no_ranks_are_no_splits() -> None:
    assert split_step([]) == ()


def test_an_empty_step_has_no_share() -> None:
    (split,) = split_step([Stamps(start=1, end=1, cut=1, data_s=0, optimizer_s=0)])
    assert split.comm_share == 0


@st.composite
def steps(draw: st.DrawFn) -> list[Stamps]:
    """Ranks that hand over buckets in turn on one engine, as they can really happen."""
    n, buckets = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    moments = st.floats(0, 1)
    ready = [sorted(draw(moments) for _ in range(buckets + 1)) for _ in range(n)]
    ends = [0.0] * n
    collectives: list[list[tuple[float, float]]] = [[] for _ in range(n)]
    for bucket in range(buckets):
        starts = [max(ready[rank][bucket], ends[rank]) for rank in range(n)]
        last = max(starts)
        for rank in range(n):
            ends[rank] = last + draw(moments)
            collectives[rank].append((starts[rank], ends[rank]))
    result = []
    for rank in range(n):
        cut = ready[rank][max(0, buckets - 1)]
        optimizer_s = draw(moments)
        result.append(
            Stamps(
                start=0.0,
                end=max(cut, ends[rank]) + optimizer_s,
                cut=cut,
                data_s=draw(st.floats(0, 1)) * cut,
                optimizer_s=optimizer_s,
                collectives=tuple(collectives[rank]),
            )
        )
    return result


@given(steps())
def test_the_parts_add_up_and_none_is_negative(ranks: list[Stamps]) -> None:
    for stamps, split in zip(ranks, split_step(ranks), strict=True):
        assert parts(split) == pytest.approx(split.step_s)
        assert split.step_s == stamps.end - stamps.start
        assert min(split.compute_s, split.wait_s, split.transfer_s, split.overlapped_s) >= 0
        assert split.other_s >= -1e-9
        assert 0 <= split.comm_share <= 1
