"""A queue whose file descriptor a poller can wait on, beside its sockets."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """What other threads hand to an I/O thread.

    Example:
        >>> from hetkit.launch.outbox import Outbox
        >>> outbox = Outbox()
        >>> outbox.put("a")
        True
        >>> list(outbox.drain()), outbox.finish(), outbox.put("b")
        (['a'], True, False)
        >>> outbox.close()
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._lock = threading.Lock()
        self._event: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.closing = False

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when there is something to do."""
        if self._event is None:
            raise ValueError("the outbox is closed")
        return self._event

    def put(self, item: Item) -> bool:
        """Queues an item and wakes the poller; returns False where the outbox takes no more."""
        with self._lock:
            if self._event is None or self.closing:
                return False
            self._items.append(item)
            os.eventfd_write(self._event, 1)
            return True

    def finish(self) -> bool:
        """Takes no more and wakes the poller; returns False where that was done before."""
        with self._lock:
            if self._event is None or self.closing:
                return False
            self.closing = True
            os.eventfd_write(self._event, 1)
            return True

    def drain(self) -> Iterator[Item]:
        """Yields what is queued, in order."""
        with contextlib.suppress(BlockingIOError):  # the poller was woken by something else
            os.eventfd_read(self.fileno())
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """Frees the descriptor; closing twice is fine."""
        with self._lock:
            self.closing = True
            if self._event is not None:
                os.close(self._event)
                self._event = None
