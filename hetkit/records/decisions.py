"""What the balancer decided, why, and what it then brought: predicted beside measured.

Windows running in which it stayed for the same reason are one row, so that a run of a day keeps its
few re-plans in sight::

    step   windows  batches          decision      predicted  measured
       6         1  32 + 32          → 45 + 19         28.9 %    27.1 %
      13        94  45 + 19          stay               0.3 %         –
     480         1  45 + 19          → 38 + 26         14.0 %    13.2 %     the card ran hot
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import overload

from hetkit.planning.balancer import Decision, Outcome
from hetkit.records.report import dash, format_share, html_table, text_table

MOST_DECISIONS = 500
"""How many of the newest rows are kept."""

_HEADERS = ("step", "windows", "batches", "decision", "predicted gain", "measured gain", "reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionRow:
    """One decision of the balancer, or several alike that followed each other.

    Args:
        step: The last step that the (first) decision knew of.
        batches: Samples per rank then.
        outcome: One of `Outcome`'s names; ``"replan"`` is the one that changed something.
        new_batches: Samples per rank decided on; None: stay.
        predicted_gain: Share of the step that the best split would save, exchange included, of the
            last decision; None while it could not be told.
        measured_gain: Share of the step that the re-plan did save: between the medians of the
            windows before and after it. None until that is measured, and where something else
            changed meanwhile.
        windows: Decisions that this row stands for.
        reason: Why, of the last decision.

    Example:
        >>> DecisionRow(step=6, batches=(32, 32), outcome="balanced", reason="even").windows
        1
    """

    step: int
    batches: tuple[int, ...]
    outcome: Outcome
    new_batches: tuple[int, ...] | None = None
    predicted_gain: float | None = None
    measured_gain: float | None = None
    windows: int = 1
    reason: str = ""

    def _cells(self) -> tuple[str, ...]:
        new = self.new_batches
        return (
            str(self.step),
            str(self.windows),
            _plus(self.batches),
            "stay" if new is None else f"→ {_plus(new)}",
            format_share(self.predicted_gain),
            format_share(self.measured_gain),
            self.reason,
        )


class Decisions(Sequence[DecisionRow]):
    """The balancer's decisions, oldest first; shows as a table. Read from any thread.

    Args:
        rows: The rows to begin with. Default: none.

    Example:
        >>> decisions = Decisions()
        >>> decisions.add(Decision(reason="28 % faster", outcome="replan", batches=(45, 19)),
        ...               step=6, batches=(32, 32))
        >>> decisions.measure(0.25)
        >>> decisions[0].measured_gain
        0.25
    """

    def __init__(self, rows: Sequence[DecisionRow] = ()) -> None:
        # A tuple, replaced whole: whoever reads while the coordinator adds sees one state of it.
        self._rows = tuple(rows)

    def add(self, decision: Decision, *, step: int, batches: tuple[int, ...]) -> None:
        """Takes a decision made after ``step``, under ``batches``."""
        rows, windows, first = self._rows, 1, step
        last = rows[-1] if rows else None
        alike = last and (last.outcome, last.batches) == (decision.outcome, batches)
        if last and alike and decision.batches is None:
            rows, windows, first = rows[:-1], last.windows + 1, last.step
        row = DecisionRow(
            step=first,
            batches=batches,
            outcome=decision.outcome,
            new_batches=decision.batches,
            predicted_gain=decision.predicted_gain,
            windows=windows,
            reason=decision.reason,
        )
        self._rows = (*rows, row)[-MOST_DECISIONS:]

    def measure(self, gain: float) -> None:
        """The last re-plan has turned out to save this share of the step."""
        rows = list(self._rows)
        for index in range(len(rows) - 1, -1, -1):
            if rows[index].new_batches is not None:
                rows[index] = replace(rows[index], measured_gain=gain)
                break
        self._rows = tuple(rows)

    @property
    def replans(self) -> tuple[DecisionRow, ...]:
        """The decisions that changed the split."""
        return tuple(row for row in self._rows if row.new_batches is not None)

    @overload
    def __getitem__(self, index: int) -> DecisionRow: ...
    @overload
    def __getitem__(self, index: slice) -> "Decisions": ...
    def __getitem__(self, index: int | slice) -> "DecisionRow | Decisions":
        return Decisions(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[DecisionRow]:
        return iter(self._rows)

    def __str__(self) -> str:
        rows = self._rows
        if not rows:
            return "The balancer has decided nothing yet."
        return text_table(_HEADERS, [row._cells() for row in rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(
            _HEADERS, [row._cells() for row in self._rows], caption="Decisions of the balancer"
        )


def _plus(batches: Sequence[int]) -> str:
    return dash(" + ".join(map(str, batches)) or None)


class Effect:
    """Measures what a re-plan brings: the median full step before it against the one after.

    ::

        steps   … 8 9 10 11 12 │ 13 14 │ 15 … 19
                   before      ↑  drop    after        both without an epoch's smaller last step
                            decision

    Example:
        >>> effect = Effect()
        >>> for step_s in (1.0, 1.2, 1.0): effect.add(step_s)
        >>> effect.window()
        >>> effect.expect((45, 19))
        >>> effect.begins((45, 19), alike=True)
        >>> for step_s in (0.75, 0.75, 0.8): effect.add(step_s)
        >>> effect.window()
        0.25
    """

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._typical_s: float | None = None
        self._before_s: float | None = None
        self._expected: tuple[int, ...] | None = None
        self._running = False

    def add(self, step_s: float) -> None:
        """Takes a full step of the present window."""
        self._steps.append(step_s)

    def restart(self) -> None:
        """The present window begins anew."""
        self._steps = []

    def window(self) -> float | None:
        """The present window is complete; returns the gain, where a re-plan is measured by it."""
        self._typical_s = median(self._steps) if self._steps else None
        self._steps = []
        if not self._running or self._typical_s is None or self._before_s is None:
            return None
        gain = 1 - self._typical_s / self._before_s
        self._forget()
        return gain

    def expect(self, batches: tuple[int, ...]) -> None:
        """A re-plan has been decided on: the last window is what it is compared with."""
        self._before_s, self._expected, self._running = self._typical_s, batches, False

    def begins(self, batches: tuple[int, ...], *, alike: bool) -> None:
        """A plan begins; ``alike``: it differs from the one before in nothing but its split."""
        if not alike or (self._expected is not None and batches != self._expected):
            self._forget()
            self._typical_s = None
        self._running = self._expected is not None

    def _forget(self) -> None:
        self._before_s, self._expected, self._running = None, None, False
