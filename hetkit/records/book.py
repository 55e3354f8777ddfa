"""The book: what the coordinator writes down, step by step, epoch by epoch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.records.assembly import StepAssembly
from hetkit.records.epochs import LedgerRow, summarise_epoch
from hetkit.records.forecast import Kept
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.records.steps import Event, EventKind, StepRecord


class Book:
    """Writes the history and the ledger of one session.

    Args:
        history: Takes the steps and events.
        ledger: Takes a row per epoch.
    """

    def __init__(self, history: History, ledger: Ledger) -> None:
        self.history = history
        self.ledger = ledger
        self._places = tuple(range(history.world_size))
        self._assembly = StepAssembly(self._places)
        self._records: list[StepRecord] = []
        self._events: Counter[str] = Counter()
        self._changes: tuple[str, ...] = ()
        self._again = False

    def seat(self, places: Sequence[int]) -> None:
        """Other devices run the ranks from now on: those at these places of the fleet."""
        self._places = tuple(places)
        self._forget_pending()

    def begin_epoch(self, changes: Sequence[str]) -> None:
        """Starts an epoch's account; after a `roll_back`, that of the same epoch once more.

        All rows of earlier epochs have come by now. What is still pending came from workers that
        are gone, and must not be taken for a part of the steps to come.
        """
        if not self._again:
            self._events = Counter()
            self._changes = ()
        self._again = False
        self._records = []
        self._changes += tuple(changes)
        self._forget_pending()

    def take(
        self, rank: int, rows: Sequence[StepRow]
    ) -> list[tuple[StepRecord, tuple[StepRow, ...]]]:
        """Writes down the steps that a rank's rows complete, and returns them."""
        whole = self._assembly.add(rank, rows)
        for record, of_ranks in whole:
            self.history.append(record)
            self._records.append(record)
            self._note_trouble(record, of_ranks)
        return whole

    def _note_trouble(self, record: StepRecord, rows: Sequence[StepRow]) -> None:
        skipped = [rank for rank, row in enumerate(rows) if row.skipped]
        if skipped:
            # With local steps a rank skips alone.
            who = (
                "all ranks" if len(skipped) == len(rows) else f"rank {', '.join(map(str, skipped))}"
            )
            self.note("skip", f"a gradient was not finite: {who} skipped the step", record)
        for rank, row in enumerate(rows):
            text = f"the loss of rank {rank} was not finite"
            if math.isfinite(row.loss_sum):
                continue
            if text in self._events:  # one event an epoch is enough, the ledger counts them all
                self._events[text] += 1
            else:
                self.note("notice", text, record, rank=rank)

    def note(
        self,
        kind: EventKind,
        text: str,
        at: StepRecord | None = None,
        *,
        step: int | None = None,
        epoch: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Writes an event down, at the step it belongs to (default: the latest)."""
        at = at or self.history.latest
        self.history.add_event(
            Event(
                step=step if step is not None else at.step if at else 0,
                epoch=epoch if epoch is not None else at.epoch if at else 0,
                time_s=at.time_s if at else 0.0,
                kind=kind,
                text=text,
                rank=rank,
            )
        )
        if kind not in ("epoch", "settings"):
            self._events[text] += 1

    def end_epoch(
        self,
        plan: Plan,
        reports: Sequence[Mapping[str, tuple[float, float]]],
        *,
        emulated: bool,
        forecast: Kept,
        spread_floor: float | None,
    ) -> LedgerRow | None:
        """Closes the epoch's account with the ranks' validation sums; None if it has no steps."""
        if not self._records:
            return None
        predicted = forecast.predicted
        row = LedgerRow.of(
            summarise_epoch(self._records, sync_every=plan.sync_every),
            plan,
            places=self._places,
            emulated=emulated,
            spread_floor=spread_floor,
            metrics=combine(reports),
            predicted_step_s=predicted.step_s if predicted else None,
            predicted_low_s=predicted.low_s if predicted else None,
            predicted_high_s=predicted.high_s if predicted else None,
            prediction_error=forecast.error,
            changes=self._changes,
            events=tuple(_counted(text, times) for text, times in self._events.items()),
        )
        self.ledger.add(row)
        return row

    def roll_back(self, step: int) -> None:
        """Forgets the steps from ``step`` on, which are executed again; what happened stays."""
        self._records = [record for record in self._records if record.step < step]
        self._again = not self._records
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._assembly = StepAssembly(self._places, self._assembly.origin)

    def recent_samples_per_s(self) -> float | None:
        """Returns the throughput over the last few steps; None before there are any."""
        latest = self._records[-7:]
        seconds = sum(record.step_s for record in latest)
        return sum(record.samples for record in latest) / seconds if seconds else None

    def recent_step_s(self) -> float | None:
        """Returns the median duration of the last few steps; None before there are any."""
        latest = sorted(record.step_s for record in self._records[-7:])
        return latest[len(latest) // 2] if latest else None


def _counted(text: str, times: int) -> str:
    return text if times == 1 else f"{text} ({times} times)"


class Overhead:
    """What a step costs the critical rank beside its computing, lately (moving averages).

    Attributes:
        all_s: Everything but compute.
        exchange_s: The exchange alone: waiting, transfer and codec.
    """

    def __init__(self) -> None:
        self.all_s = 0.0
        self.exchange_s = 0.0
        self._steps = 0

    def add(self, record: StepRecord) -> None:
        """Takes a step in."""
        rank = record.critical
        self._steps += 1
        weight = max(0.1, 1 / self._steps)
        self.all_s += weight * (max(0.0, rank.step_s - rank.compute_s) - self.all_s)
        exchange_s = rank.wait_s + rank.transfer_s + rank.codec_s
        self.exchange_s += weight * (exchange_s - self.exchange_s)


def combine(reports: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Returns each metric over all ranks: Σ sums / Σ counts, so each sample counts once.

    Example:
        >>> combine([{"loss": (3.0, 2.0)}, {"loss": (1.0, 2.0)}])
        {'loss': 1.0}
    """
    metrics = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        found = [report[name] for report in reports if name in report]
        total = sum(each for each, _ in found)
        count = sum(each for _, each in found)
        if count:
            metrics[name] = total / count
    return metrics
