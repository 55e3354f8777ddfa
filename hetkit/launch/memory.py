"""The channel within one process, for ``devices="inline"``: queues instead of sockets."""

import queue

from hetkit.launch.ends import Deliver, Inbox, Peer, address_of, hand_over, next_message, open_wire
from hetkit.launch.messages import Message, decode, encode


class MemoryHub:
    """The coordinator's end of a channel within one process."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._open = True

    def send(self, peer: Peer, message: Message) -> None:
        """Sends to the one worker; never blocks, may be called from any thread."""
        if self._open:
            self._inbox.put(decode(encode(message)))

    def close(self) -> None:
        """Closes; closing twice is fine."""
        self._open = False
        self._inbox.put(None)


class MemoryLink:
    """The worker's end of a channel within one process."""

    def __init__(self, deliver: Deliver, inbox: Inbox, peer: Peer) -> None:
        self._deliver = deliver
        self._inbox = inbox
        self._peer = peer
        self._open = True

    def send(self, message: Message) -> None:
        """Delivers to the coordinator, from the calling thread."""
        if self._open:
            hand_over(self._deliver, *open_wire(address_of(self._peer), [encode(message)]))

    def receive(self, timeout_s: float | None) -> Message | None:
        """Returns the next message, or None when none came in time or the hub is closed."""
        return next_message(self._inbox, timeout_s) if self._open else None

    def close(self, linger_s: float = 1.0) -> None:
        """Closes; closing twice is fine."""
        self._open = False
        self._inbox.put(None)


def memory_channel(deliver: Deliver, peer: Peer | None = None) -> tuple[MemoryHub, MemoryLink]:
    """Returns the two ends of a channel within one process, for ``devices="inline"``.

    Messages go through their wire form, so that whatever could not travel is found here too.

    Args:
        deliver: Called with each message of the worker, from the worker's own thread.
        peer: Who the worker is; rank 0 of generation 0 by default.

    Example:
        >>> from hetkit.launch.channel import Peer, memory_channel
        >>> from hetkit.launch.messages import Grant
        >>> hub, link = memory_channel(lambda peer, message: None)
        >>> hub.send(Peer(0, 0), Grant(until=3))
        >>> link.receive(timeout_s=0)
        Grant(until=3)
    """
    inbox: Inbox = queue.SimpleQueue()
    return MemoryHub(inbox), MemoryLink(deliver, inbox, peer or Peer(0, 0))
