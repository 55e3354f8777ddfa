"""The progress bar of ``session.wait()``: rich in a terminal, one line in a notebook."""

import sys
from collections.abc import Callable
from typing import TextIO

from hetkit.records.report import format_rate, format_seconds
from hetkit.records.status import Status

REFRESH_S = 0.25


def follow(
    status: Callable[[], Status], wait: Callable[[float], bool], stream: TextIO | None = None
) -> None:
    """Shows the progress until ``wait`` says that the run has ended.

    Args:
        status: Returns where the session stands.
        wait: Waits for the run's end for some seconds; returns True when it has ended.
        stream: Where to; default: standard error. Neither a terminal nor a notebook: silent.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        _in_terminal(status, wait, stream)
    elif "ipykernel" in sys.modules:
        _in_notebook(status, wait, stream)
    else:
        while not wait(REFRESH_S):
            pass


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
    status: Callable[[], Status], wait: Callable[[float], bool], stream: TextIO
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.description}"),
    )
    console = Console(file=stream, force_jupyter=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        ended = False
        while not ended:
            ended = wait(REFRESH_S)
            bar.update(task, completed=status().progress.done, description=describe(status()))


def _in_notebook(
    status: Callable[[], Status], wait: Callable[[float], bool], stream: TextIO
) -> None:
    width = 0
    ended = False
    while not ended:
        ended = wait(2 * REFRESH_S)
        line = describe(status())
        stream.write("\r" + line.ljust(width))
        stream.flush()
        width = len(line)
    stream.write("\n")
