"""What the kernel and its nursery say to each other over their socket pair: typed data, framed.

::

    kernel (launch.local)                      nursery (worker.nursery)
      │ ── Preload, Fork, Kill ──────────────▶ │
      │ ◀── Imported, Forked, Output, Exited ─ │
      │ ── end of stream: end all, leave ────▶ │

A frame is its length as four bytes, big-endian, and a message in msgpack.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from hetkit.errors import ProtocolError
from hetkit.launch.ends import Keys, Peer

_LENGTH_BYTES = 4
_FRAME_MAX_BYTES = 64 << 20


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its birth; everything else comes over its link.

    Args:
        session: Names the session, so that its workers can be told from another's.
        peer: The worker's generation and rank.
        endpoint: The hub's address.
        keys: What the hub lets it in by.
        folder: The session's private folder.
        env: Environment variables on top of the kernel's.
        preload: Modules to import before anything else.
        entry: The function to run, as ``module:name``; it gets this object.

    Example:
        >>> from hetkit.launch.channel import Peer
        >>> from hetkit.launch.local import WorkerStart
        >>> WorkerStart(session="demo", peer=Peer(generation=1, rank=0)).entry
        'hetkit.worker.rank:run'
    """

    session: str
    peer: Peer
    endpoint: str = ""
    keys: Keys = Keys(server_public=b"", client_public=b"", client_secret=b"")
    folder: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    preload: tuple[str, ...] = ()
    entry: str = "hetkit.worker.rank:run"


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process finds around it; a worker gets the kernel's of the moment it is forked.

    As bytes, since none of it need be valid UTF-8.
    """

    folder: bytes
    path: tuple[bytes, ...]
    environ: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def here(cls) -> "Surroundings":
        """Returns this process's surroundings."""
        folder = b""
        with contextlib.suppress(FileNotFoundError):  # somebody removed the working directory
            folder = os.getcwdb()
        return cls(
            folder=folder,
            path=tuple(os.fsencode(p) for p in sys.path if isinstance(p, str)),
            environ=tuple(os.environb.items()),
        )

    def enter(self) -> None:
        """Makes them this process's own."""
        for name in os.environb.keys() - dict(self.environ).keys():
            del os.environb[name]
        os.environb.update(self.environ)
        sys.path[:] = [os.fsdecode(p) for p in self.path]
        with contextlib.suppress(OSError):  # gone meanwhile: stay where we are
            os.chdir(self.folder or b".")


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the kernel asks of the nursery."""


class Preload(Order, frozen=True, kw_only=True):
    """Import these modules once, for all workers to come."""

    modules: tuple[str, ...]
    surroundings: Surroundings


class Fork(Order, frozen=True, kw_only=True):
    """Start a worker."""

    start: WorkerStart
    surroundings: Surroundings


class Kill(Order, frozen=True, kw_only=True):
    """End a worker's process group, or all of a session's."""

    session: str
    peer: Peer | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the nursery tells."""


class Imported(Event, frozen=True, kw_only=True):
    """The nursery is ready to fork."""

    import_s: float


class Forked(Event, frozen=True, kw_only=True):
    """A worker's process exists."""

    session: str
    peer: Peer
    pid: int


class Output(Event, frozen=True, kw_only=True):
    """A worker has written to ``"stdout"`` or ``"stderr"``."""

    session: str
    peer: Peer
    stream: str
    text: str


class Exited(Event, frozen=True, kw_only=True):
    """A worker's process has ended; all of its output has been told before.

    Either ``exitcode`` or ``signal`` is None. ``pid`` is None where it could not be forked.
    """

    session: str
    peer: Peer
    pid: int | None
    exitcode: int | None = None
    signal: int | None = None


class NurseryLost(Event, frozen=True, kw_only=True):
    """The nursery has ended by itself, and all of its workers with it; made in the kernel."""

    reason: str


AnyOrder = Preload | Fork | Kill
AnyEvent = Imported | Forked | Output | Exited


def frame(item: Order | Event) -> bytes:
    """Returns the framed wire form of an order or an event."""
    wire = msgspec.msgpack.encode(item)
    return len(wire).to_bytes(_LENGTH_BYTES, "big") + wire


class Unframer:
    """Cuts a byte stream into messages of one kind.

    Args:
        kind: ``AnyOrder`` or ``AnyEvent``.

    Example:
        >>> from hetkit.launch.orders import AnyOrder, Kill, Unframer, frame
        >>> wire = frame(Kill(session="demo"))
        >>> unframer = Unframer(AnyOrder)
        >>> list(unframer.feed(wire[:5])), list(unframer.feed(wire[5:]))
        ([], [Kill(session='demo', peer=None)])
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields each message that ``data`` completes.

        Raises:
            ProtocolError: The stream is not one of ours.
        """
        self._rest += data
        while len(self._rest) >= _LENGTH_BYTES:
            length = int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
            if length > _FRAME_MAX_BYTES:
                raise ProtocolError(f"a frame of {length} bytes: not a hetkit nursery's stream.")
            end = _LENGTH_BYTES + length
            if len(self._rest) < end:
                return
            wire = bytes(self._rest[_LENGTH_BYTES:end])
            del self._rest[:end]
            try:
                yield self._decoder.decode(wire)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"not a message of the nursery: {error}") from error
