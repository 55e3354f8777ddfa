from hypothesis import given
from hypothesis import strategies as st

from hetkit.worker.order import micro_batches
from hetkit.worker.rounds import rank_pieces, rounds

RANKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5).filter(
    lambda ranks: any(share for share, _ in ranks)
)


@given(ranks=RANKS)
def test_every_rank_gets_its_samples_in_as_many_rounds_within_its_limit(ranks):
    shares, largest = zip(*ranks, strict=True)
    cut = rounds(shares, largest)
    assert tuple(map(sum, zip(*cut, strict=True))) == shares
    assert all(n <= most for part in cut for n, most in zip(part, largest, strict=True))
    sizes = [sum(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    fewest = max(-(-share // most) for share, most in ranks)
    assert fewest <= len(cut) <= max(2 * fewest, 2)


@given(ranks=RANKS, start=st.integers(0, 100))
def test_a_round_has_the_same_samples_for_every_split(ranks, start):
    shares, largest = zip(*ranks, strict=True)
    total = sum(shares)
    every = [rank_pieces(start, shares, largest, rank) for rank in range(len(ranks))]
    found = [
        [sample for first, stop in part for sample in range(first, stop)]
        for part in zip(*every, strict=True)
    ]
    alone = micro_batches(start, total, -(-total // len(found)))
    if len(alone) == len(found):
        assert found == [list(range(first, stop)) for first, stop in alone]
    assert [sample for part in found for sample in part] == list(range(start, start + total))


@given(st.integers(1, 100), st.integers(1, 100))
def test_one_rank_alone_is_cut_as_without_rounds(share, largest):
    assert rank_pieces(0, [share], [largest], 0) == micro_batches(0, share, largest)
