"""The ledger as a table: which columns there are, and which of them fit the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hetkit.records.epochs import LedgerRow
from hetkit.records.report import (
    LINE,
    dash,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    table_width,
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the ledger.

    Args:
        head: Its title.
        cell: Returns its cell of a row.
        after: How many are given up before it where the page is too narrow; 0 goes first.
    """

    head: str
    cell: Callable[[LedgerRow], str]
    after: int


def choose_columns(rows: Sequence[LedgerRow], width: int = LINE) -> tuple[list[Column], list[str]]:
    """Returns the columns that fit ``width`` characters, and the line that names the others.

    Columns that no row has a value for are left out unnamed.
    """
    columns = _columns(rows)
    omitted: list[Column] = []
    while len(columns) > 1 and table_width(*fill_columns(rows, columns)) > width:
        # Of those that matter as little, the rightmost.
        omitted.append(min(reversed(columns), key=lambda column: column.after))
        columns.remove(omitted[-1])
    if not omitted or not rows:
        return columns, []
    names = ", ".join(column.head for column in reversed(omitted))
    return columns, [f"not shown, for want of width: {names}; to_pandas() has all"]


def fill_columns(
    rows: Sequence[LedgerRow], columns: Sequence[Column]
) -> tuple[list[str], list[list[str]]]:
    """Returns the titles, and the cells of each row."""
    return [c.head for c in columns], [[c.cell(row) for c in columns] for row in rows]


def note(row: LedgerRow) -> str:
    """Returns what was switched at the epoch's start, and what else happened."""
    return "; ".join((*row.changes, *row.events))


def metric_names(rows: Sequence[LedgerRow]) -> list[str]:
    """Returns the validation metrics that any row has."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def describe_settings(row: LedgerRow) -> str:
    """Returns the settings in force on one line."""
    return f"{_batches(row)}, amp {_amp(row)}, {row.compression}"


def _columns(rows: Sequence[LedgerRow]) -> list[Column]:
    base = next((row for row in rows if row.even), rows[0] if rows else None)
    versus = "vs even" if base is not None and base.even else "vs first"
    several = any(len(row.ranks) > 1 for row in rows)
    columns: list[tuple[str, Callable[[LedgerRow], str], int]] = [
        ("epoch", lambda row: str(row.epoch), 99),
        ("batches", _batches, 98),
        ("amp", _amp, 80),
        ("compression", lambda row: row.compression, 81),
        ("sync", _sync, 90 if any(row.sync_every > 1 for row in rows) else -1),
        ("lr", lambda row: dash(row.lr, "{:.4g}".format), 20),
        ("samples/s", lambda row: format_number(row.samples_per_s), 97),
        (versus, lambda row: _speed_up(row, base), 96),
        ("step", lambda row: format_seconds(row.step_s), 70),
        ("forecast", lambda row: format_seconds(row.predicted_step_s), 40),
        ("comm", lambda row: format_share(row.comm_share), 75),
        ("spread", lambda row: format_share(row.compute_spread), 60 if several else -1),
        ("floor", lambda row: format_share(row.spread_floor), 10),
        ("sent", lambda row: format_bytes(row.wire_bytes), 30 if several else -1),
        ("memory", _memory, 15),
        ("cosine", lambda row: dash(row.guard_cosine, "{:.3f}".format), 65),
        ("skipped", lambda row: str(row.skipped_steps), 50 if _skips(rows) else -1),
        ("loss scale", lambda row: dash(row.loss_scale, "{:g}".format), 25),
        ("loss", lambda row: dash(row.loss, _short), 95),
        *[(_metric_title(name), _metric_cell(name), 85) for name in metric_names(rows)],
    ]
    made = [
        Column(head=head, cell=cell, after=after) for head, cell, after in columns if after >= 0
    ]
    return [c for c in made if c.after > 90 or any(c.cell(row) != dash(None) for row in rows)]


def _skips(rows: Sequence[LedgerRow]) -> bool:
    return any(row.skipped_steps or row.loss_scale is not None for row in rows)


def _metric_title(name: str) -> str:
    return "val loss" if name == "loss" else name


def _metric_cell(name: str) -> Callable[[LedgerRow], str]:
    return lambda row: dash(row.metrics.get(name), _short)


def _batches(row: LedgerRow) -> str:
    return _grouped([str(batch) for batch in row.batches], f"{min(row.batches)}…{max(row.batches)}")


def _amp(row: LedgerRow) -> str:
    return row.amp[0] if len(set(row.amp)) == 1 else _grouped(row.amp, "mixed")


def _grouped(values: Sequence[str], summary: str) -> str:
    """Returns values per rank, equal neighbours together: "2×58 + 4×35"."""
    if len(values) <= 3:
        return " + ".join(values)
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    parts = [value if count == 1 else f"{count}×{value}" for value, count in runs]
    texts = (" + ".join(parts), "+".join(parts))
    return next((text for text in texts if len(text) <= 20), f"{summary} on {len(values)}")


def _memory(row: LedgerRow) -> str:
    known = [peak for peak in row.memory_peak_bytes if peak is not None]
    return format_bytes(max(known, default=None))


def _sync(row: LedgerRow) -> str:
    return "each step" if row.sync_every == 1 else f"every {row.sync_every} (other maths)"


def _speed_up(row: LedgerRow, base: LedgerRow | None) -> str:
    return dash(None if base is None else row.samples_per_s / base.samples_per_s, "{:.2f}×".format)


def _short(value: float) -> str:
    return f"{value:#.4g}"
