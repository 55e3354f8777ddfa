"""The mailbox of a thread: what other threads put in is handled one after the other."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from hetkit.errors import SessionError

Item = TypeVar("Item")


class Command:
    """Something to do, and whoever waits for it.

    Args:
        action: What the mailbox's thread is to do.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self.done: Future[None] = Future()
        self._action = action

    def execute(self) -> None:
        """Executes the command; what it raises goes to whoever waits, not to the thread."""
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - it is raised where the command was given
            self.done.set_exception(error)
        else:
            self.done.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Tells whoever waits that the command will not be executed."""
        self.done.set_exception(error)


class Mailbox(Generic[Item]):
    """A queue that can be closed: nobody waits for an answer that will never come.

    Args:
        closed: What a command is told that comes too late.

    Example:
        >>> mailbox = Mailbox[str](closed="the shop is closed.")
        >>> mailbox.put("a letter")
        >>> mailbox.take(timeout_s=0)
        'a letter'
        >>> mailbox.close()
        >>> mailbox.ask(print, timeout_s=1)
        Traceback (most recent call last):
            ...
        hetkit.errors.SessionError: the shop is closed.
    """

    def __init__(self, *, closed: str) -> None:
        self._closed = closed
        self._items: queue.SimpleQueue[Item | Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True

    def put(self, item: Item | Command) -> None:
        """Hands something over; a command that comes too late is refused."""
        with self._lock:
            if self._open:
                self._items.put(item)
                return
        if isinstance(item, Command):
            item.refuse(SessionError(self._closed))

    def ask(self, command: Callable[[], None], timeout_s: float) -> None:
        """Has ``command`` executed by the mailbox's thread, and waits for it.

        Raises:
            SessionError: The mailbox is closed.
            TimeoutError: The thread did not come to it in time.
            Exception: What the command raised.
        """
        asked = Command(command)
        self.put(asked)
        asked.done.result(timeout_s)

    def take(self, timeout_s: float) -> Item | Command | None:
        """Returns the oldest item; None when none comes in time."""
        try:
            return self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait()
        except queue.Empty:
            return None

    def take_until(self, deadline: float, handle: Callable[[Item], bool]) -> None:
        """Handles items but no commands, which stay in place, until ``handle`` returns True.

        Args:
            deadline: When to give up, on the monotonic clock.
            handle: Takes an item; returns whether that was all.
        """
        waiting: list[Command] = []
        while (left := deadline - time.monotonic()) > 0:
            item = self.take(left)
            if isinstance(item, Command):
                waiting.append(item)
            elif item is not None and handle(item):
                break
        for command in waiting:
            self.put(command)

    def close(self) -> None:
        """Refuses the commands that are left and all that come later."""
        with self._lock:
            self._open = False
        while (item := self.take(0)) is not None:
            if isinstance(item, Command):
                item.refuse(SessionError(self._closed))
