"""The board: where the session's status hangs, for everybody to read and to wait for."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hetkit.records.status import Status


class Board:
    """Holds the present status; one thread changes it, any thread reads it.

    Example:
        >>> board = Board()
        >>> board.post(state="ready")
        >>> board.wait(lambda status: status.state == "ready", timeout_s=0)
        True
    """

    def __init__(self) -> None:
        self._status = Status()
        self._changed = threading.Condition()

    @property
    def status(self) -> Status:
        """The present status, a frozen record."""
        return self._status

    def post(self, **changes: Any) -> None:
        """Changes some fields at once, and wakes whoever waits."""
        with self._changed:
            self._status = replace(self._status, **changes)
            self._changed.notify_all()

    def wait(self, until: Callable[[Status], bool], timeout_s: float | None) -> bool:
        """Waits until the status satisfies ``until``; returns False when time runs out."""
        with self._changed:
            return self._changed.wait_for(lambda: until(self._status), timeout_s)
