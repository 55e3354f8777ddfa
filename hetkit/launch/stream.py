"""The socket between the kernel and its nursery, for either end's selector loop: never waits."""

import selectors
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

from hetkit.launch.orders import Event, Order, Unframer, frame

_READ_BYTES = 256 << 10


class Stream:
    """A socket that carries framed messages and holds what the other end does not take yet.

    Args:
        end: This process's end of the socket pair.
        kind: What may arrive: ``AnyOrder`` or ``AnyEvent``.
        selector: Where it waits; its key's data is this stream.

    Attributes:
        backlog_bytes: How much waits to be sent.
        ended: Whether nothing more will arrive.

    Example:
        >>> import selectors, socket
        >>> from hetkit.launch.orders import AnyEvent, AnyOrder, Kill
        >>> from hetkit.launch.stream import Stream
        >>> one, other = socket.socketpair()
        >>> with selectors.DefaultSelector() as selector:
        ...     kernel, nursery = Stream(one, AnyEvent, selector), Stream(other, AnyOrder, selector)
        ...     kernel.send(Kill(session="demo"))
        ...     list(nursery.receive())
        [Kill(session='demo', peer=None)]
        >>> kernel.close(), nursery.close()
        (None, None)
    """

    def __init__(self, end: socket.socket, kind: Any, selector: selectors.BaseSelector) -> None:
        end.setblocking(False)
        self._end = end
        self._unframer = Unframer(kind)
        self._selector = selector
        self._unsent: deque[memoryview] = deque()
        self._awaited = 0
        self.backlog_bytes = 0
        self.ended = False
        self._await()

    def send(self, item: Order | Event) -> None:
        """Sends, or holds until the other end takes it."""
        self.send_wire(frame(item))

    def send_wire(self, wire: bytes) -> None:
        """Sends what has been framed before."""
        self._unsent.append(memoryview(wire))
        self.backlog_bytes += len(wire)
        self.flush()

    def flush(self) -> None:
        """Sends as much as the other end takes now."""
        try:
            while self._unsent:
                sent = self._end.send(self._unsent[0])
                self.backlog_bytes -= sent
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone: the reading side finds that out, and all it said
            self.drop()
        self._await()

    def drop(self) -> None:
        """Forgets what waits to be sent."""
        self._unsent.clear()
        self.backlog_bytes = 0

    def receive(self) -> Iterator[Any]:
        """Yields what has arrived.

        Raises:
            ProtocolError: It is not a stream of ours.
        """
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.ended = True
            self._await()
        yield from self._unframer.feed(data)

    def finish(self) -> None:
        """Tells the other end that nothing more will come, even where a fork holds this socket."""
        self.drop()
        try:
            self._end.shutdown(socket.SHUT_WR)
        except OSError:  # it is gone
            return
        self._await()

    def detach(self) -> int:
        """Returns the descriptor, for a forked child to close."""
        return self._end.detach()

    def close(self) -> None:
        """Closes this end; closing twice is fine."""
        self._end.close()

    def _await(self) -> None:
        reading = 0 if self.ended else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if self._unsent else 0)
        if events == self._awaited:
            return
        if self._awaited:
            self._selector.unregister(self._end)
        if events:
            self._selector.register(self._end, events, self)
        self._awaited = events
