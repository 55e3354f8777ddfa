"""What ``session.wait()`` shows: a live table in a terminal, one line in a notebook."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from hetkit.records.history import History
from hetkit.records.report import dash, format_bytes, format_rate, format_seconds
from hetkit.records.status import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 0.25

Ended = Callable[[float], bool]
"""Waits for the run's end for some seconds at most; returns whether it has ended."""


def follow(
    status: Callable[[], Status], history: History, ended: Ended, stream: TextIO | None = None
) -> None:
    """Shows how the training goes until the run has ended.

    Args:
        status: Returns where the session stands.
        history: What was measured.
        ended: Waits for the end.
        stream: Where to; default: standard error, in a notebook standard output, since Jupyter
            paints the former like an error. Neither a terminal nor a notebook: silent.
    """
    notebook = in_kernel()
    stream = stream or (sys.stdout if notebook else sys.stderr)
    if stream.isatty():
        _in_terminal(status, history, ended, stream)
    elif notebook:
        _in_notebook(status, ended, stream)
    else:
        while not ended(REFRESH_S):
            pass


def in_kernel() -> bool:
    """Tells whether this process is a notebook's kernel; asks IPython only where it is loaded.

    That ``ipykernel`` is among the modules says less: a test runner may have imported it.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def describe(status: Status) -> str:
    """Returns the progress as one line.

    Example:
        >>> describe(Status(state="new"))
        'new'
    """
    progress = status.progress
    parts: list[str] = [status.state]
    if progress.epochs_target:
        epoch = min(progress.epoch + 1, progress.epochs_target)
        parts.append(f"epoch {epoch}/{progress.epochs_target}")
        parts.append(f"step {progress.step}")
    if progress.samples_per_s is not None:
        parts.append(format_rate(progress.samples_per_s))
    if progress.eta_s is not None:
        parts.append(f"{format_seconds(progress.eta_s)} left")
    return " · ".join(parts)


def _in_terminal(
    status: Callable[[], Status], history: History, ended: Ended, stream: TextIO
) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, force_jupyter=False)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        over = False
        while not over:
            over = ended(REFRESH_S)
            live.update(_live_view(status(), history), refresh=True)


def _live_view(status: Status, history: History) -> "RenderableType":
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid()
    bar.add_row(ProgressBar(total=1.0, completed=status.progress.done, width=60))
    table = Table(box=None, pad_edge=False)
    for title in ("device", "batch", "samples/s", "compute", "wait", "transfer", "memory"):
        table.add_column(title, justify="left" if title == "device" else "right")
    latest = history.latest
    for rank, label in enumerate(history.labels):
        name = f"{label} (emulated)" if history.emulated[rank] else label
        if latest is None:
            table.add_row(name, *("–",) * 6)
            continue
        step = latest.ranks[rank]
        table.add_row(
            name,
            str(step.batch),
            f"{step.samples_per_s:,.0f}",
            *(format_seconds(part) for part in (step.compute_s, step.wait_s, step.transfer_s)),
            dash(step.memory_bytes, format_bytes),
        )
    return Group(bar, Text(describe(status), no_wrap=True, overflow="ellipsis"), table)


def _in_notebook(status: Callable[[], Status], ended: Ended, stream: TextIO) -> None:
    width = 0
    over = False
    while not over:
        over = ended(2 * REFRESH_S)
        line = describe(status())
        stream.write("\r" + line.ljust(width))
        stream.flush()
        width = len(line)
    stream.write("\n")
