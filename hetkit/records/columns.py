"""Long series kept bounded: the old part is averaged into ever wider, equal groups.

Halving the older half again and again would leave the start of a long run in a single point. So
the older half is laid out on a grid of ``width`` rows a point, and ``width`` doubles only when
the grid itself has grown too long::

    before   |■■■■|■■■■|■■■■|□|□|□|□|□|□|□|□| □ □ □ □ □ □ …     ■■■■ four rows in one point
    after    |■■■■|■■■■|■■■■|■■■■|■■■■| □ □ □ □ □ □ …           □    one row, exact
              older half: at most a quarter   newest half: as it was

Every point carries the number of its rows, so averages over the whole series stay exact.
"""

import math
from collections.abc import Collection, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Columns:
    """Named columns of floats, preallocated, of which at most ``capacity`` rows are kept.

    The newest ``capacity // 2`` rows are always exact. NaN stands for a missing reading: it takes
    no part in an average.

    Args:
        names: One key per column; the first column never decreases.
        capacity: Most rows kept, at least 4.
        last: Columns of which a merged point keeps the last row's value (positions, times).
        peak: Columns of which a merged point keeps the largest value. All others are averaged.

    Raises:
        ValueError: ``capacity`` is below 4.

    Example:
        >>> columns = Columns(["step", "loss"], capacity=4, last=["step"])
        >>> for step, loss in enumerate([8.0, 6.0, 4.0, 2.0, 1.0]):
        ...     columns.append([step, loss])
        >>> columns["step"].tolist(), columns["loss"].tolist(), columns.counts.tolist()
        ([1.0, 2.0, 3.0, 4.0], [7.0, 4.0, 2.0, 1.0], [2.0, 1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        names: Sequence[Hashable],
        *,
        capacity: int,
        last: Collection[Hashable] = (),
        peak: Collection[Hashable] = (),
    ) -> None:
        if capacity < 4:
            raise ValueError(f"capacity must be at least 4 points, not {capacity!r}.")
        self._index = {name: index for index, name in enumerate(names)}
        self._last = [self._index[name] for name in last]
        self._peak = [self._index[name] for name in peak]
        self._rows = np.empty((capacity, len(names)))
        self._counts = np.empty(capacity)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: Hashable) -> Floats:
        """Returns a copy of one column, oldest first."""
        return self._rows[: self._size, self._index[name]].copy()

    @property
    def counts(self) -> Floats:
        """How many appended rows each point stands for."""
        return self._counts[: self._size].copy()

    def append(self, row: Sequence[float] | Floats) -> None:
        """Adds the newest row; thins the older half first when there is no room."""
        if self._size == len(self._rows):
            self._thin()
        self._rows[self._size] = row
        self._counts[self._size] = 1.0
        self._size += 1

    def drop_from(self, first: float) -> None:
        """Drops the newest points, down to those whose first column is below ``first``."""
        self._size = int(np.searchsorted(self._rows[: self._size, 0], first))

    def _thin(self) -> None:
        half = len(self._rows) // 2
        old, counts = self._rows[:half], self._counts[:half]
        starts = group_starts(counts, most=half // 2)
        ends = np.append(starts[1:], half) - 1
        merged = group_means(old, counts, starts)
        merged[:, self._last] = old[ends][:, self._last]
        merged[:, self._peak] = np.fmax.reduceat(old[:, self._peak], starts, axis=0)
        self._close_gap(merged, np.add.reduceat(counts, starts), half)

    def _close_gap(self, merged: Floats, counts: Floats, half: int) -> None:
        size = len(merged) + self._size - half
        self._rows[len(merged) : size] = self._rows[half : self._size].copy()
        self._counts[len(merged) : size] = self._counts[half : self._size].copy()
        self._rows[: len(merged)] = merged
        self._counts[: len(merged)] = counts
        self._size = size


def group_starts(counts: Floats, *, most: int) -> NDArray[np.intp]:
    """Returns where each group of neighbouring points begins.

    All are equally wide: the smallest power of two that gives at most ``most`` of them and is not
    below the widest point. So groups made earlier fit whole into those made later.

    Args:
        counts: Rows that each point stands for, shape ``(points,)``.
        most: Largest number of groups, at least 1.

    Returns:
        Indices of the groups' first points, at most ``most`` of them.

    Example:
        >>> group_starts(np.array([2.0, 2.0, 1.0, 1.0, 1.0, 1.0]), most=4).tolist()
        [0, 1, 2, 4]
    """
    offsets = np.cumsum(counts) - counts
    width = 2 ** math.ceil(math.log2(counts.max()))
    while True:
        starts = np.flatnonzero(np.diff(offsets // width, prepend=-1.0))
        if len(starts) <= most:
            return starts
        width *= 2


def group_means(values: Floats, counts: Floats, starts: NDArray[np.intp]) -> Floats:
    """Returns the mean of each group, weighted by the rows that its points stand for.

    NaN takes no part; a group of nothing else stays NaN.

    Args:
        values: Shape ``(points, columns)``.
        counts: Rows that each point stands for, shape ``(points,)``.
        starts: First point of each group.

    Returns:
        Shape ``(groups, columns)``.
    """
    known = ~np.isnan(values)
    weights = known * counts[:, None]
    # inf − inf of a diverged loss is NaN, and rightly so: no warning is due.
    with np.errstate(invalid="ignore"):
        total = np.add.reduceat(np.where(known, values, 0.0) * weights, starts, axis=0)
    weight = np.add.reduceat(weights, starts, axis=0)
    means: Floats = np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)
    return means
