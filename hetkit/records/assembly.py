"""Puts the ranks' accounts of a step together: only all of them tell who waited for whom."""

from collections.abc import Iterable, Sequence

from hetkit.launch.messages import StepRow
from hetkit.planning.time_split import split_step
from hetkit.records.steps import RankStep, StepRecord


class StepAssembly:
    """Collects the rows of all ranks and gives back whole steps, in order.

    Args:
        places: Each rank's place in the fleet, by which its steps are written down.
        origin: The moment that ``time_s`` counts from; None: the first step's start.
    """

    def __init__(self, places: Sequence[int], origin: float | None = None) -> None:
        self.origin = origin
        self._places = tuple(places)
        self._pending: dict[int, dict[int, StepRow]] = {}

    def add(
        self, rank: int, rows: Sequence[StepRow]
    ) -> list[tuple[StepRecord, tuple[StepRow, ...]]]:
        """Takes a rank's rows; returns the steps that are complete now, with their rows."""
        whole = []
        for row in rows:
            step = self._pending.setdefault(row.step, {})
            step[rank] = row
            if len(step) == len(self._places):
                del self._pending[row.step]
                whole.append(tuple(step[each] for each in range(len(self._places))))
        return [(self._record(ranks), ranks) for ranks in whole]

    def _record(self, rows: tuple[StepRow, ...]) -> StepRecord:
        if self.origin is None:
            self.origin = min(row.stamps.start for row in rows)
        splits = split_step([row.stamps for row in rows])
        time_s = max(row.stamps.end for row in rows) - self.origin
        first = rows[0]
        count = sum(row.count for row in rows)
        ranks = tuple(
            RankStep(
                step=row.step,
                epoch=row.epoch,
                rank=place,
                time_s=time_s,
                batch=row.batch,
                step_s=split.step_s,
                data_s=split.data_s,
                compute_s=split.compute_s,
                wait_s=split.wait_s,
                transfer_s=split.transfer_s,
                codec_s=split.codec_s,
                optimizer_s=split.optimizer_s,
                other_s=split.other_s,
                overlapped_s=split.overlapped_s,
                wire_bytes=row.wire_bytes,
                memory_bytes=row.memory_bytes,
                memory_peak_bytes=row.memory_peak_bytes,
                loss=row.loss_sum / row.count if row.count else None,
            )
            for place, row, split in zip(self._places, rows, splits, strict=True)
        )
        return StepRecord(
            step=first.step,
            epoch=first.epoch,
            time_s=time_s,
            samples=sum(row.batch for row in rows),
            loss=sum(row.loss_sum for row in rows) / count if count else None,
            skipped=any(row.skipped for row in rows),
            loss_scale=min((row.loss_scale for row in rows if row.loss_scale), default=None),
            lr=first.lr,
            # Of sums, which all ranks have alike; where each looks for itself, the worst counts.
            guard_cosine=min(_known(row.guard_cosine for row in rows), default=None),
            guard_error=max(_known(row.guard_error for row in rows), default=None),
            ranks=ranks,
        )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
