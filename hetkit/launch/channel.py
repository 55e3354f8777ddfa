"""The channel between the coordinator and its workers: ZeroMQ with CURVE keys, or queues.

::

    kernel                                          worker (one link each)
    ZmqHub: ROUTER ◀── ipc://<folder>/hub, CURVE ──▶ ZmqLink: DEALER
      one I/O thread, deliver(peer, message)          one I/O thread, receive()

`send` puts the message's wire form into an outbox and wakes the I/O thread, which alone owns the
sockets. A hub makes the keys of its session: whoever does not hold the session's client key is
refused by the ZAP handler (RFC 27) before a byte of theirs is read. Control messages are few and
small, so no high-water mark makes a sender wait.
"""

import logging
import os
import queue
import threading
from pathlib import Path

import zmq
from zmq.utils import z85

from hetkit.errors import LaunchError, ProtocolError
from hetkit.launch.ends import (
    Deliver,
    Hub,
    Inbox,
    Keys,
    Link,
    Peer,
    address_of,
    hand_over,
    next_message,
    open_wire,
)
from hetkit.launch.memory import MemoryHub, MemoryLink, memory_channel
from hetkit.launch.messages import Message, decode, encode
from hetkit.launch.outbox import Outbox

__all__ = [
    "Hub",
    "Keys",
    "Link",
    "MemoryHub",
    "MemoryLink",
    "Peer",
    "ZmqHub",
    "ZmqLink",
    "memory_channel",
]

log = logging.getLogger(__name__)

_DOMAIN = b"hetkit"
_UNIX_PATH_MAX = 107
_JOIN_S = 5.0
_TURN = 256  # messages taken in before the outbox gets its turn


class ZmqHub:
    """The coordinator's end over ZeroMQ.

    Args:
        deliver: Called with each message that has arrived, from the hub's I/O thread.
        folder: A private folder for the socket; its path must be short, for the path of a unix
            socket has at most 107 bytes.

    Raises:
        LaunchError: The path is too long, or ZeroMQ was built without CURVE.

    Example:
        >>> import tempfile
        >>> from hetkit.launch.channel import Peer, ZmqHub, ZmqLink
        >>> from hetkit.launch.messages import Hello, Leave
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hub = ZmqHub(lambda peer, message: hub.send(peer, Leave()), Path(folder))
        ...     link = ZmqLink(hub.endpoint, hub.keys, Peer(1, 0))
        ...     link.send(Hello(rank=0, generation=1, pid=1))
        ...     answer = link.receive(timeout_s=10)
        ...     link.close()
        ...     hub.close()
        >>> answer
        Leave()
    """

    def __init__(self, deliver: Deliver, folder: Path) -> None:
        self._path = folder / "hub"
        if len(os.fsencode(self._path)) > _UNIX_PATH_MAX:
            raise LaunchError(
                f"the socket's path {self._path} is longer than {_UNIX_PATH_MAX} bytes: "
                "set TMPDIR to a shorter folder."
            )
        if not zmq.has("curve"):
            raise LaunchError("this pyzmq was built without CURVE: install pyzmq's own wheel.")
        self._deliver = deliver
        self._server_public, self._server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self.endpoint = f"ipc://{self._path}"
        self.keys = Keys(
            server_public=self._server_public,
            client_public=client_public,
            client_secret=client_secret,
        )
        self._outbox: Outbox[tuple[bytes, bytes]] = Outbox()
        self._context = zmq.Context()
        self._gate = self._open_gate()
        self._router = self._open_router()
        self._thread = threading.Thread(target=self._run, name="hetkit-hub", daemon=True)
        self._thread.start()

    def send(self, peer: Peer, message: Message) -> None:
        """Sends to one worker; never blocks, may be called from any thread."""
        if not self._outbox.put((address_of(peer), encode(message))):
            log.debug("the hub is closed: %s to %s dropped", type(message).__name__, peer)

    def close(self) -> None:
        """Sends what is queued within a time limit, then closes; closing twice is fine."""
        self._outbox.finish()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _open_gate(self) -> "zmq.Socket[bytes]":
        gate = self._context.socket(zmq.REP)
        gate.linger = 0
        gate.bind("inproc://zeromq.zap.01")
        return gate

    def _open_router(self) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, 0)
        router.set(zmq.RCVHWM, 0)
        router.set(zmq.LINGER, 500)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, self._server_secret)
        router.set(zmq.ZAP_DOMAIN, _DOMAIN)
        router.bind(self.endpoint)
        return router

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._gate, self._router, self._outbox):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                closing = self._outbox.closing  # looked at first: all that was put before is sent
                if self._gate in ready:
                    self._answer_gate()
                for address, wire in self._outbox.drain():
                    self._send(address, wire)
                if self._router in ready:
                    self._take()
                if closing:
                    return
        finally:
            self._router.close()
            self._gate.close()
            self._context.term()
            self._outbox.close()
            self._path.unlink(missing_ok=True)

    def _answer_gate(self) -> None:
        """Lets in whoever holds the session's client key (ZAP: https://rfc.zeromq.org/spec/27)."""
        version, request, domain, address, _, mechanism, *credentials = self._gate.recv_multipart()
        known = z85.decode(self.keys.client_public)
        good = domain == _DOMAIN and mechanism == b"CURVE" and credentials == [known]
        if not good:
            log.warning("refused a connection from %s: not a worker of this session", address)
        status = (b"200", b"OK") if good else (b"400", b"not a worker of this session")
        self._gate.send_multipart([version, request, *status, b"worker" if good else b"", b""])

    def _send(self, address: bytes, wire: bytes) -> None:
        try:
            self._router.send_multipart([address, wire], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("worker %s is not connected, message dropped: %s", address.decode(), error)

    def _take(self) -> None:
        for _ in range(_TURN):
            try:
                address, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                peer, message = open_wire(address, frames)
            except ProtocolError as error:
                log.warning("dropped a message from %r: %s", address[:64], error)
                continue
            hand_over(self._deliver, peer, message)


class ZmqLink:
    """A worker's end over ZeroMQ; made after the fork, for a context does not survive one.

    Args:
        endpoint: The hub's.
        keys: The hub's.
        peer: Who this worker is; the hub refuses messages that claim another rank.
    """

    def __init__(self, endpoint: str, keys: Keys, peer: Peer) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.ROUTING_ID, address_of(peer))
        self._dealer.set(zmq.SNDHWM, 0)
        self._dealer.set(zmq.RCVHWM, 0)
        self._dealer.set(zmq.CURVE_SERVERKEY, keys.server_public)
        self._dealer.set(zmq.CURVE_PUBLICKEY, keys.client_public)
        self._dealer.set(zmq.CURVE_SECRETKEY, keys.client_secret)
        self._dealer.connect(endpoint)
        self._outbox: Outbox[bytes] = Outbox()
        self._inbox: Inbox = queue.SimpleQueue()
        self._linger_s = 1.0
        self._thread = threading.Thread(target=self._run, name="hetkit-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Sends to the coordinator; never blocks, may be called from any thread."""
        if not self._outbox.put(encode(message)):
            log.debug("the link is closed: %s dropped", type(message).__name__)

    def receive(self, timeout_s: float | None) -> Message | None:
        """Returns the next message, or None when none came in time or the link is closed."""
        return next_message(self._inbox, timeout_s)

    def close(self, linger_s: float = 1.0) -> None:
        """Sends what is queued within ``linger_s``, then closes; closing twice is fine."""
        self._linger_s = linger_s
        self._outbox.finish()
        if threading.current_thread() is not self._thread:
            self._thread.join(linger_s + _JOIN_S)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._outbox, zmq.POLLIN)
        try:
            while True:
                poller.poll()
                closing = self._outbox.closing
                for wire in self._outbox.drain():
                    self._dealer.send(wire)
                self._take()
                if closing:
                    return
        finally:
            self._inbox.put(None)
            self._dealer.close(linger=int(self._linger_s * 1000))
            self._context.term()
            self._outbox.close()

    def _take(self) -> None:
        for _ in range(_TURN):
            try:
                self._inbox.put(decode(self._dealer.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return
            except ProtocolError as error:
                log.warning("dropped a message from the coordinator: %s", error)
