"""One small table, as text for a terminal and as HTML for a notebook."""

from collections.abc import Sequence
from html import escape


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns, two spaces apart.

    Example:
        >>> from hetkit.devices.table import text_table
        >>> print(text_table(("device", "memory"), [("cpu #0", "–")]))
        device  memory
        cpu #0  –
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """Returns an HTML table; every text in it is escaped. No script, no style sheet."""
    left = 'style="text-align:left"'
    head = "".join(f'<th scope="col" {left}>{escape(cell)}</th>' for cell in header)
    lines = ("".join(f"<td {left}>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    title = f"<caption {left}>{escape(caption)}</caption>"
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
