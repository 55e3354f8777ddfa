"""The ledger: one row per epoch, to see at once what a changed setting did."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from hetkit.records.charts import draw_epochs
from hetkit.records.difference import EpochComparison, compare_epochs
from hetkit.records.epochs import SPLIT, EpochSummary, LedgerRow, summarise_epoch
from hetkit.records.ledger_table import (
    choose_columns,
    describe_settings,
    fill_columns,
    metric_names,
    note,
)
from hetkit.records.noise import Noise
from hetkit.records.report import PAGE, data_frame, fold, html_table, text_table

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

__all__ = ["EpochSummary", "Ledger", "LedgerRow", "summarise_epoch"]


class Ledger(Sequence[LedgerRow]):
    """The rows of a session's epochs, oldest first; shows as a table in text and in notebooks.

    Slicing gives a ledger again. The speed-up is against the first epoch with an even split, or
    against the first epoch where there is none.

    Args:
        labels: A label per rank.
        rows: The rows to begin with. Default: none.

    Example:
        >>> ledger = Ledger(labels=["A100 #0", "V100 #1"])
        >>> print(ledger)
        Ledger of A100 #0, V100 #1: no epoch is finished yet.
    """

    def __init__(self, labels: Sequence[str], rows: Sequence[LedgerRow] = ()) -> None:
        self.labels = tuple(labels)
        # A tuple, replaced whole: whoever reads while the coordinator adds sees one state of it.
        self._rows = tuple(rows)

    def add(self, row: LedgerRow) -> None:
        """Adds the row of an epoch that has ended."""
        self._rows = (*self._rows, row)

    @overload
    def __getitem__(self, index: int) -> LedgerRow: ...
    @overload
    def __getitem__(self, index: slice) -> "Ledger": ...
    def __getitem__(self, index: int | slice) -> "LedgerRow | Ledger":
        if isinstance(index, slice):
            return Ledger(self.labels, self._rows[index])
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self._rows)

    def compare(self, a: int, b: int) -> EpochComparison:
        """Returns what differs between two epochs, figure by figure, with its noise.

        A difference whose 95 % interval covers 0 is *no clear difference*. Epochs of fewer than 6
        steps, and figures that are read once an epoch, have no interval.

        Args:
            a: Number of the epoch that is compared with, as the ledger shows it.
            b: Number of the other one.

        Raises:
            ValueError: There is no such epoch.
        """
        by_epoch = {row.epoch: row for row in self._rows}
        for epoch in (a, b):
            if epoch not in by_epoch:
                there = ", ".join(map(str, by_epoch)) or "none yet"
                raise ValueError(f"epoch {epoch!r} is not in the ledger; there are: {there}.")
        return compare_epochs(by_epoch[a], by_epoch[b])

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns one row per epoch; what differs per rank has a column for each, by its label.

        Metrics are prefixed with ``val_``; changes and events are joined with ``"; "``; columns
        ending in ``_error`` are standard errors.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        rows = self._rows
        columns: dict[str, list[Any]] = {}
        for name in (field.name for field in fields(LedgerRow)):
            values = [getattr(row, name) for row in rows]
            if name == "metrics":
                columns |= {f"val_{m}": [v.get(m) for v in values] for m in metric_names(rows)}
            elif name == "noise":
                names = dict.fromkeys(figure for noise in values for figure in noise)
                columns |= {f"{n}_error": [_error(noise.get(n)) for noise in values] for n in names}
            elif name in ("changes", "events"):
                columns[name] = ["; ".join(value) for value in values]
            elif any(isinstance(value, tuple) for value in values):
                for rank, label in enumerate(self.labels):
                    columns[f"{name}[{label}]"] = [_item(row, name, rank) for row in rows]
            else:
                columns[name] = values
        return data_frame(columns)

    def plot(self) -> "Figure":
        """Returns a plotly figure: throughput per epoch, and each rank's time split, stacked."""
        rows = self._rows
        bars = [(row, rank) for row in rows for rank in range(len(row.compute_s))]
        return draw_epochs(
            title=self._caption(rows),
            epochs=[row.epoch for row in rows],
            samples_per_s=[row.samples_per_s for row in rows],
            notes=[describe_settings(row) for row in rows],
            bars=(
                [f"epoch {row.epoch}" for row, _ in bars],
                [self.labels[row.ranks[rank]] for row, rank in bars],
            ),
            parts={part: [getattr(row, f"{part}_s")[rank] for row, rank in bars] for part in SPLIT},
        )

    def __str__(self) -> str:
        rows = self._rows
        columns, omitted = choose_columns(rows)
        table = [text_table(*fill_columns(rows, columns))] if rows else []
        # Below the table, not in it: they would make every line as long as the longest.
        notes = [f"epoch {row.epoch}: {note(row)}" for row in rows if note(row)]
        lines = [self._caption(rows), *table, *omitted, *notes]
        return "\n".join(line if line in table else fold(line) for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self._rows
        columns, omitted = choose_columns(rows, PAGE)
        caption = " · ".join((self._caption(rows), *omitted))
        notes = [note(row) for row in rows]
        return html_table(*fill_columns(rows, columns), caption=caption, notes=notes)

    def _caption(self, rows: Sequence[LedgerRow]) -> str:
        state = "" if rows else ": no epoch is finished yet."
        emulated = any(row.emulated for row in rows)
        mark = " (emulated: speed, times and memory are of emulated devices)" if emulated else ""
        return f"Ledger of {', '.join(self.labels)}{mark}{state}"


def _error(noise: Noise | None) -> float | None:
    return None if noise is None else noise.error


def _item(row: LedgerRow, name: str, rank: int) -> Any:
    values = getattr(row, name)
    place = row.ranks.index(rank) if rank in row.ranks else len(values)
    return values[place] if place < len(values) else None
