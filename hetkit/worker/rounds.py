"""Rounds: how a step is cut into micro-batches where the ranks must run them side by side.

Layers that look across the samples of a micro-batch (`hetkit.worker.batchnorm`) make the cut part
of the maths. So the step's slice is cut first, into the fewest, most even, rounds, and each round
is then split over the ranks::

    slice     │ 0  1  2  3  4 │ 5  6  7  8  9 │      two rounds, batches (7, 3)
    rank 0    │ 0  1  2  3    │ 5  6  7       │
    rank 1    │             4 │          8  9 │

For one number of rounds, each round has the same samples for every split and every number of
ranks, one included. One round, the whole step, is what there is unless ``micro_batch`` or a
device's memory asks for more.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hetkit.planning.batch_split import ratio_split


def rounds(shares: Sequence[int], largest: Sequence[int]) -> list[tuple[int, ...]]:
    """Cuts a step into rounds.

    Args:
        shares: Samples per rank in the step, in sum at least 1.
        largest: Largest micro-batch per rank.

    Returns:
        For each round the samples per rank; a rank may have none in some.

    Example:
        >>> rounds([7, 3], [4, 4])
        [(4, 1), (3, 2)]
    """
    fewest = max(-(-share // most) for share, most in zip(shares, largest, strict=True))
    for count in range(fewest, sum(shares) + 1):
        cut = _cut(shares, count)
        if all(n <= most for part in cut for n, most in zip(part, largest, strict=True)):
            return cut
    raise ValueError(f"shares {tuple(shares)} cannot be cut into micro-batches of {largest}")


def rank_pieces(
    start: int, shares: Sequence[int], largest: Sequence[int], rank: int
) -> list[tuple[int, int]]:
    """Returns a rank's part of each round, as ``(first, stop)``; the two are equal for none.

    Args:
        start: Where the step's slice begins.
        shares: Samples per rank in the step.
        largest: Largest micro-batch per rank.
        rank: The rank.

    Example:
        >>> rank_pieces(0, [7, 3], [4, 4], 1)
        [(4, 5), (8, 10)]
    """
    cut = rounds(shares, largest)
    starts = accumulate((sum(part) for part in cut), initial=start)
    pieces = []
    for begin, part in zip(starts, cut, strict=False):
        first = begin + sum(part[:rank])
        pieces.append((first, first + part[rank]))
    return pieces


def _cut(shares: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Splits each of ``count`` even rounds in the proportions of what the ranks have left."""
    left, total = list(shares), sum(shares)
    edges = [(total * place + count - 1) // count for place in range(count + 1)]
    cut = []
    for begin, end in pairwise(edges):
        part = ratio_split(left, end - begin)
        left = [have - took for have, took in zip(left, part, strict=True)]
        cut.append(part)
    return cut
