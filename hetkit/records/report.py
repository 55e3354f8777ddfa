"""How figures look, everywhere: text for terminals, HTML for notebooks, a DataFrame for pandas.

Pure functions. A missing reading is None and shows as a dash, never as 0. Whatever a user named
(a metric, a device) is escaped in HTML and kept on one line in text.
"""

import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

if TYPE_CHECKING:
    import pandas

DASH = "–"
"""What stands for a reading that does not exist."""

LINE = 120
"""Most characters of a line of text that a table should take."""

PAGE = 104
"""The same for HTML: a notebook in a window of 1,280 pixels, its file browser open, fits this."""

_CELL = "padding:0.25em 0.45em;border:none;white-space:nowrap;"
_NOTE = (
    "padding:0 0.45em 0.4em 0.45em;border:none;text-align:left;white-space:normal;"
    "overflow-wrap:anywhere;color:var(--jp-ui-font-color2,inherit);"
)
_FRAME = "max-width:100%;overflow-x:auto;"
_RULE = "border-bottom:1px solid var(--jp-border-color2,#8884);"
_TABLE = (
    "border-collapse:collapse;border:none;font-variant-numeric:tabular-nums;"
    "color:var(--jp-ui-font-color1,inherit);background:transparent;"
    "font-size:var(--jp-ui-font-size1,0.9em);"
)
_CAPTION = "caption-side:top;text-align:left;padding:0.25em 0.45em;font-weight:600;color:inherit;"


def dash(value: Any, form: Callable[[Any], str] = str) -> str:
    """Returns ``form(value)``, or a dash where the value is None or not a number.

    Example:
        >>> dash(3), dash(None), dash(float("nan")), dash(0.5, "{:.2f}".format)
        ('3', '–', '–', '0.50')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return DASH
    return form(value)


def format_bytes(size_bytes: float | None) -> str:
    """Returns a size with a binary prefix, as memory is sold: 1 GiB = 2³⁰ bytes.

    Example:
        >>> format_bytes(26_214_400), format_bytes(512), format_bytes(None)
        ('25.0 MiB', '512 B', '–')
    """
    return dash(size_bytes, lambda size: _prefixed(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB")))


def format_seconds(time_s: float | None) -> str:
    """Returns a duration in the unit that a person would choose.

    Example:
        >>> [format_seconds(t) for t in (0.00032, 0.0456, 1.5, 125, 3720, None)]
        ['320 µs', '45.6 ms', '1.50 s', '2 min 05 s', '1 h 02 min', '–']
    """
    return dash(time_s, _duration)


def format_rate(per_s: float | None, unit: str = "samples") -> str:
    """Returns a rate; of ``"bytes"`` with a decimal prefix, as links are sold.

    Example:
        >>> format_rate(1234.5), format_rate(8.25), format_rate(2e9, "bytes"), format_rate(None)
        ('1,234 samples/s', '8.25 samples/s', '2.00 GB/s', '–')
    """
    if unit == "bytes":
        return dash(per_s, lambda rate: _prefixed(rate, 1000, ("B", "kB", "MB", "GB", "TB")) + "/s")
    return dash(per_s, lambda rate: f"{format_number(rate)} {unit}/s")


def format_share(share: float | None) -> str:
    """Returns a part of a whole in per cent.

    Example:
        >>> format_share(0.352), format_share(0.0123), format_share(None)
        ('35 %', '1.2 %', '–')
    """
    return dash(share, lambda part: f"{100 * part:.{0 if abs(part) >= 0.1 else 1}f} %")


def format_number(value: float | None) -> str:
    """Returns a number with at least three significant digits and thousands apart.

    Example:
        >>> format_number(12345.6), format_number(87.25), format_number(0.012345)
        ('12,346', '87.2', '0.0123')
    """
    return dash(value, _number)


def one_line(text: str) -> str:
    r"""Returns the text on one line, without control characters that a terminal would obey.

    Example:
        >>> one_line("two\nlines \x1b[31mred")
        'two lines �[31mred'
    """
    words = " ".join(text.split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words)


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as aligned plain text; columns of numbers stand to the right.

    Args:
        headers: One title per column.
        rows: The cells, as text, one per column.

    Raises:
        ValueError: A row has another length than the headers.

    Example:
        >>> print(text_table(["device", "samples/s"], [["A100", "230"], ["V100", "99.5"]]))
        device  samples/s
        ──────  ─────────
        A100          230
        V100         99.5
    """
    _check_rectangle(headers, rows)
    lines = [[one_line(cell) for cell in row] for row in (headers, *rows)]
    columns = list(zip(*lines, strict=True))
    widths = [max(cell_len(cell) for cell in column) for column in columns]
    right = [_is_numeric(column[1:]) for column in columns]
    lines.insert(1, ["─" * width for width in widths])
    return "\n".join("  ".join(map(_padded, line, widths, right)).rstrip() for line in lines)


def table_width(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Returns how many characters wide `text_table` makes the table.

    Example:
        >>> table_width(["device", "samples/s"], [["A100", "230"], ["V100", "99.5"]])
        17
    """
    columns = zip(headers, *rows, strict=True)
    widths = [max(cell_len(one_line(cell)) for cell in column) for column in columns]
    return sum(widths) + 2 * (len(widths) - 1)


def fold(text: str) -> str:
    """Returns a text of one line, folded to `LINE` characters; what goes on is set in.

    Example:
        >>> fold("short")
        'short'
        >>> max(len(line) for line in fold("a word " * 40).splitlines()) <= LINE
        True
    """
    return textwrap.fill(one_line(text), LINE, subsequent_indent="  ")


def html_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Returns a table as HTML that reads well in JupyterLab's light and dark themes.

    Every header, cell and the caption are escaped. The style is inline and takes JupyterLab's own
    colours, with fallbacks that inherit the page's.

    Args:
        headers: One title per column.
        rows: The cells, as text, one per column.
        caption: What the table shows; none when empty.
        notes: One for each row, or none at all: what stands below it, over all columns; it wraps,
            so that it makes the table no wider. An empty one takes no room.

    Raises:
        ValueError: A row has another length than the headers.

    Example:
        >>> "<b>" in html_table(["<b>"], [["<b>"]], caption="<b>")
        False
    """
    _check_rectangle(headers, rows)
    right = [_is_numeric([row[index] for row in rows]) for index in range(len(headers))]
    aligns = ["text-align:right;" if numeric else "text-align:left;" for numeric in right]
    head = "".join(
        f'<th scope="col" style="{_CELL}{_RULE}{align}">{html.escape(header)}</th>'
        for header, align in zip(headers, aligns, strict=True)
    )
    body = "".join(
        f"<tr>{_html_cells(row, aligns)}</tr>{_html_note(note, len(headers))}"
        for row, note in zip(rows, notes or [""] * len(rows), strict=True)
    )
    title = f'<caption style="{_CAPTION}">{html.escape(caption)}</caption>' if caption else ""
    return (
        f'<div style="{_FRAME}"><table style="{_TABLE}">{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def data_frame(columns: Mapping[str, Any]) -> "pandas.DataFrame":
    """Returns the columns as a pandas DataFrame; pandas is imported here only.

    Raises:
        ModuleNotFoundError: pandas is not installed; the message says how to get it.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_pandas() needs pandas, which is not installed: run `pip install pandas` in this "
            "environment and call it again (no restart is needed).",
            name="pandas",
        ) from error
    return pandas.DataFrame(columns)


def _prefixed(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    # 999.5 of a unit would show as 1,000 of it: go on to the next one.
    while abs(value) >= base - 0.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:,.0f} {units[0]}" if power == 0 else f"{_number(value)} {units[power]}"


def _duration(time_s: float) -> str:
    if not math.isfinite(time_s):
        return str(time_s)
    if abs(time_s) < 0.9995e-3:
        return f"{1e6 * time_s:.0f} µs"
    if abs(time_s) < 0.9995:
        return f"{_number(1e3 * time_s)} ms"
    if abs(time_s) < 59.95:
        return f"{_number(time_s)} s"
    minutes, seconds = divmod(round(time_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(time_s / 60), 60)
    return f"{hours} h {minutes:02d} min"


def _number(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    value = float(f"{value:.2e}") if abs(value) < 100 else value
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}" if digits <= 5 else f"{value:.2e}"


def _padded(cell: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if right else cell + space


def _is_numeric(cells: Sequence[str]) -> bool:
    shown = [cell for cell in cells if cell != DASH]
    return bool(shown) and all(
        cell.lstrip("+-−×").startswith(tuple("0123456789")) for cell in shown
    )


def _html_cells(row: Sequence[str], aligns: Sequence[str]) -> str:
    return "".join(
        f'<td style="{_CELL}{align}">{html.escape(cell)}</td>'
        for cell, align in zip(row, aligns, strict=True)
    )


def _html_note(note: str, columns: int) -> str:
    if not note:
        return ""
    return f'<tr><td colspan="{columns}" style="{_NOTE}">{html.escape(note)}</td></tr>'


def _check_rectangle(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells for {len(headers)} headers: {row!r}")
