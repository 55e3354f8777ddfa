"""Steps as columns: one per field of a step and of each rank, and the curves made from them."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetkit.records.columns import Columns, Floats
from hetkit.records.steps import RankStep, StepRecord

_PLACE = ("step", "epoch", "time_s")
_RANK_FIELDS = tuple(f.name for f in fields(RankStep) if f.name not in (*_PLACE, "rank"))
_RANK_DERIVED = ("samples_per_s", "pace", "comm_share")
_STEP_FIELDS = (
    *_PLACE,
    *("samples", "step_s", "loss", "skipped", "loss_scale", "lr", "comm_share", "compute_spread"),
    *("wire_bytes", "guard_cosine", "guard_error"),
)


class StepColumns:
    """A bounded store of steps. Not safe to share between threads by itself: `History` locks it.

    Args:
        labels: A label per rank.
        emulated: Per rank, whether its device is emulated.
        capacity: Most points kept, at least 4.

    Example:
        >>> columns = StepColumns(labels=["A100 #0"], emulated=[True], capacity=2000)
        >>> columns.curve("loss", rank=None).tolist()
        []
    """

    def __init__(self, *, labels: Sequence[str], emulated: Sequence[bool], capacity: int) -> None:
        self._labels = tuple(labels)
        self._emulated = tuple(emulated)
        ranks = range(len(labels))
        names: list[tuple[int | None, str]] = [(None, name) for name in _STEP_FIELDS]
        names += [(rank, name) for rank in ranks for name in _RANK_FIELDS]
        self._columns = Columns(
            names,
            capacity=capacity,
            last=[(None, name) for name in _PLACE],
            peak=[(rank, "memory_peak_bytes") for rank in ranks],
        )

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def counts(self) -> Floats:
        """How many steps each point stands for."""
        return self._columns.counts

    def append(self, record: StepRecord) -> None:
        """Adds a step, and drops those at or after it that were undone.

        Raises:
            ValueError: The step has a rank that there is no column for.
        """
        by_rank: list[list[float | None]] = [[None] * len(_RANK_FIELDS) for _ in self._labels]
        for rank in record.ranks:
            if not 0 <= rank.rank < len(self._labels):
                raise ValueError(
                    f"step {record.step} has a rank {rank.rank}, but the history was made for "
                    f"{len(self._labels)} ranks: {', '.join(self._labels)}."
                )
            by_rank[rank.rank] = [getattr(rank, name) for name in _RANK_FIELDS]
        row = [getattr(record, name) for name in _STEP_FIELDS]
        row += [value for values in by_rank for value in values]
        self._columns.drop_from(record.step)
        self._columns.append([math.nan if value is None else float(value) for value in row])

    def curve(self, name: str, rank: int | None) -> Floats:
        """Returns one value per point, shape ``(points,)``; NaN where there is no reading.

        Raises:
            ValueError: There is no such curve, or no such rank; the message names those there are.
        """
        if rank is not None and not 0 <= rank < len(self._labels):
            raise ValueError(f"rank must be from 0 to {len(self._labels) - 1}, not {rank!r}.")
        known = curve_names(rank)
        if name not in known:
            raise ValueError(f"{name!r} is not a series; there are: {', '.join(known)}.")
        if name in _PLACE:
            return self._columns[None, name]
        if rank is None and name == "samples_per_s":
            return self._ratio(None, ("samples",), "step_s")
        if rank is not None and name in _RANK_DERIVED:
            return self._derived(name, rank)
        return self._columns[rank, name]

    def frame(self) -> dict[str, NDArray[Any]]:
        """Returns all points in long form: one row per point and rank that took part."""
        parts = [self._rank_frame(rank) for rank in range(len(self._labels))]
        columns = {name: np.stack([part[name] for part in parts], axis=1) for name in parts[0]}
        present = ~np.isnan(columns["step_s"])
        return {name: values[present] for name, values in columns.items()}

    def _derived(self, name: str, rank: int) -> Floats:
        # The formulas of RankStep, on columns; of a merged point, sums over sums.
        if name == "samples_per_s":
            return self._ratio(rank, ("batch",), "step_s")
        if name == "pace":
            return self._ratio(rank, ("batch",), "compute_s")
        return self._ratio(rank, ("wait_s", "transfer_s", "codec_s"), "step_s")

    def _ratio(self, rank: int | None, above: Sequence[str], below: str) -> Floats:
        total = sum((self._columns[rank, name] for name in above), start=np.zeros(len(self)))
        divisor = self._columns[rank, below]
        ratio: Floats = np.divide(
            total, divisor, out=np.full_like(total, np.nan), where=divisor > 0
        )
        return ratio

    def _rank_frame(self, rank: int) -> dict[str, NDArray[Any]]:
        frame: dict[str, NDArray[Any]] = {
            "step": self._columns[None, "step"].astype(int),
            "epoch": self._columns[None, "epoch"].astype(int),
            "time_s": self._columns[None, "time_s"],
            "steps": self._columns.counts.astype(int),
            "rank": np.full(len(self), rank),
            "device": np.full(len(self), self._labels[rank], dtype=object),
            "emulated": np.full(len(self), self._emulated[rank]),
        }
        frame |= {name: self.curve(name, rank) for name in (*_RANK_FIELDS, *_RANK_DERIVED)}
        of_all = (
            *("samples_per_s", "step_s", "loss", "comm_share", "skipped"),
            *("loss_scale", "lr", "guard_cosine", "guard_error"),
        )
        return frame | {f"all_{name}": self.curve(name, None) for name in of_all}


def curve_names(rank: int | None) -> tuple[str, ...]:
    """Returns the names of the curves that there are of a rank, or of the step of all ranks.

    Example:
        >>> "pace" in curve_names(0), "pace" in curve_names(None)
        (True, False)
    """
    if rank is None:
        return (*_STEP_FIELDS, "samples_per_s")
    return (*_PLACE, *_RANK_FIELDS, *_RANK_DERIVED)
