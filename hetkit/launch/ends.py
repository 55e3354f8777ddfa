"""The two ends of the channel between the coordinator and its workers, however it is made."""

import logging
import queue
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from hetkit.errors import ProtocolError
from hetkit.launch.messages import Message, decode

log = logging.getLogger(__name__)


class Peer(NamedTuple):
    """One worker process: a rank of one generation of a session's process group.

    Example:
        >>> from hetkit.launch.channel import Peer
        >>> Peer(generation=2, rank=0).generation
        2
    """

    generation: int
    rank: int


Deliver = Callable[[Peer, Message], None]
"""Called with each message that has arrived; must not block."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to be let in: the server's public key and the session's client pair."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        return "Keys(…)"


Inbox = queue.SimpleQueue[Message | None]
"""Messages that have arrived; None marks the end."""


class Hub(Protocol):
    """The coordinator's end."""

    def send(self, peer: Peer, message: Message) -> None:
        """Sends to one worker; never blocks, may be called from any thread."""

    def close(self) -> None:
        """Sends what is queued within a time limit, then closes; closing twice is fine."""


class Link(Protocol):
    """A worker's end."""

    def send(self, message: Message) -> None:
        """Sends to the coordinator; never blocks, may be called from any thread."""

    def receive(self, timeout_s: float | None) -> Message | None:
        """Returns the next message, or None when none came in time or the link is closed.

        Args:
            timeout_s: How long to wait; None waits until a message comes or the link is closed.
        """

    def close(self, linger_s: float = 1.0) -> None:
        """Sends what is queued within ``linger_s``, then closes; closing twice is fine."""


def address_of(peer: Peer) -> bytes:
    """Returns the peer's routing id, ``generation:rank``."""
    return f"{peer.generation}:{peer.rank}".encode()


def open_wire(address: bytes, frames: list[bytes]) -> tuple[Peer, Message]:
    """Returns who sent what.

    Raises:
        ProtocolError: It is not one of our messages, or claims to be another worker's.
    """
    try:
        generation, rank = (int(part) for part in address.split(b":"))
    except ValueError as error:
        raise ProtocolError("its address is not generation:rank") from error
    if len(frames) != 1:
        raise ProtocolError(f"{len(frames)} frames instead of one")
    message = decode(frames[0])
    claimed = Peer(getattr(message, "generation", generation), getattr(message, "rank", rank))
    if claimed != (generation, rank):
        raise ProtocolError(f"a {type(message).__name__} that claims to come from {claimed}")
    return Peer(generation, rank), message


def hand_over(deliver: Deliver, peer: Peer, message: Message) -> None:
    """Delivers one message; a fault in its handling is logged and ends no I/O thread."""
    try:
        deliver(peer, message)
    except Exception:
        log.exception("%s of %s could not be handled", type(message).__name__, peer)


def next_message(inbox: Inbox, timeout_s: float | None) -> Message | None:
    """Returns the inbox's next message; None when none comes in time, or at its end."""
    try:
        message = inbox.get(timeout=timeout_s) if timeout_s != 0 else inbox.get_nowait()
    except queue.Empty:
        return None
    if message is None:
        inbox.put(None)  # the end mark stays, for every later call and thread
    return message
