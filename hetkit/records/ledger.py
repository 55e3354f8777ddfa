"""The ledger: one row per epoch, to see at once what a changed setting did."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from hetkit.records.charts import draw_epochs
from hetkit.records.epochs import SPLIT, EpochSummary, LedgerRow, summarise_epoch
from hetkit.records.report import (
    dash,
    data_frame,
    format_number,
    format_seconds,
    format_share,
    html_table,
    one_line,
    text_table,
)

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

__all__ = ["EpochSummary", "Ledger", "LedgerRow", "summarise_epoch"]

_Column = tuple[str, Callable[[LedgerRow], str]]


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

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns one row per epoch; what differs per rank has a column for each, by its label.

        Metrics are prefixed with ``val_``; changes and events are joined with ``"; "``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        rows = self._rows
        columns: dict[str, list[Any]] = {}
        for name in (field.name for field in fields(LedgerRow)):
            values = [getattr(row, name) for row in rows]
            if name == "metrics":
                columns |= {f"val_{m}": [v.get(m) for v in values] for m in _metric_names(rows)}
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
            notes=[f"{_batches(row)}, amp {_amp(row)}, {row.compression}" for row in rows],
            bars=(
                [f"epoch {row.epoch}" for row, _ in bars],
                [self.labels[row.ranks[rank]] for row, rank in bars],
            ),
            parts={part: [getattr(row, f"{part}_s")[rank] for row, rank in bars] for part in SPLIT},
        )

    def __str__(self) -> str:
        rows = self._rows
        table = [text_table(*_table(rows, _columns(rows)))] if rows else []
        # Below the table, not in it: a terminal would wrap every line.
        notes = [one_line(f"epoch {row.epoch}: {_note(row)}") for row in rows if _note(row)]
        return "\n".join([one_line(self._caption(rows)), *table, *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self._rows
        columns = _columns(rows)
        if any(_note(row) for row in rows):
            columns.append(("notes", _note))
        return html_table(*_table(rows, columns), caption=self._caption(rows))

    def _caption(self, rows: Sequence[LedgerRow]) -> str:
        state = "" if rows else ": no epoch is finished yet."
        emulated = any(row.emulated for row in rows)
        mark = " (emulated: speed, times and memory are of emulated devices)" if emulated else ""
        return f"Ledger of {', '.join(self.labels)}{mark}{state}"


def _table(
    rows: Sequence[LedgerRow], columns: Sequence[_Column]
) -> tuple[list[str], list[list[str]]]:
    headers = [header for header, _ in columns]
    return headers, [[cell(row) for _, cell in columns] for row in rows]


def _columns(rows: Sequence[LedgerRow]) -> list[_Column]:
    """Returns the table's columns; those that no row has a value for are left out."""
    base = next((row for row in rows if row.even), rows[0] if rows else None)
    versus = "vs even" if base is not None and base.even else "vs first"
    floors = any(row.spread_floor is not None for row in rows)
    scaled = any(row.loss_scale is not None for row in rows)
    predicted = any(row.predicted_step_s is not None for row in rows)
    columns: list[tuple[str, Callable[[LedgerRow], str], bool]] = [
        ("epoch", lambda row: str(row.epoch), True),
        ("batches", _batches, True),
        ("amp", _amp, True),
        ("compression", lambda row: row.compression, True),
        ("sync", _sync, any(row.sync_every > 1 for row in rows)),
        ("lr", lambda row: dash(row.lr, "{:.4g}".format), any(row.lr is not None for row in rows)),
        ("samples/s", lambda row: format_number(row.samples_per_s), True),
        (versus, lambda row: _speed_up(row, base), True),
        ("step", lambda row: format_seconds(row.step_s), True),
        ("predicted", lambda row: format_seconds(row.predicted_step_s), predicted),
        ("comm share", lambda row: format_share(row.comm_share), True),
        ("spread", lambda row: format_share(row.compute_spread), True),
        ("floor", lambda row: format_share(row.spread_floor), floors),
        ("loss", lambda row: dash(row.loss, _short), True),
        *[(_metric_title(name), _metric_cell(name), True) for name in _metric_names(rows)],
        (
            "skipped",
            lambda row: str(row.skipped_steps),
            scaled or any(r.skipped_steps for r in rows),
        ),
        ("loss scale", lambda row: dash(row.loss_scale, "{:g}".format), scaled),
    ]
    return [(header, cell) for header, cell, shown in columns if shown]


def _metric_names(rows: Sequence[LedgerRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def _metric_title(name: str) -> str:
    return "val loss" if name == "loss" else name


def _metric_cell(name: str) -> Callable[[LedgerRow], str]:
    return lambda row: dash(row.metrics.get(name), _short)


def _batches(row: LedgerRow) -> str:
    return " + ".join(str(batch) for batch in row.batches)


def _amp(row: LedgerRow) -> str:
    return row.amp[0] if len(set(row.amp)) == 1 else " + ".join(row.amp)


def _sync(row: LedgerRow) -> str:
    return "each step" if row.sync_every == 1 else f"every {row.sync_every} (other maths)"


def _speed_up(row: LedgerRow, base: LedgerRow | None) -> str:
    return dash(None if base is None else row.samples_per_s / base.samples_per_s, "{:.2f}×".format)


def _note(row: LedgerRow) -> str:
    return "; ".join((*row.changes, *row.events))


def _short(value: float) -> str:
    return f"{value:#.4g}"


def _item(row: LedgerRow, name: str, rank: int) -> Any:
    values = getattr(row, name)
    place = row.ranks.index(rank) if rank in row.ranks else len(values)
    return values[place] if place < len(values) else None
