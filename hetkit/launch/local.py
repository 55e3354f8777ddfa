"""Starts workers on this machine, from a nursery process that has imported PyTorch once.

The kernel starts ``python -m hetkit.worker`` in a session of its own, so that a terminal's or a
notebook's interrupt does not reach it, and speaks with it over a socket pair: keys are never on a
command line nor in an environment. The stream's end is the nursery's signal to end all workers and
leave; so when the kernel dies, however it dies, they are gone.
"""

import atexit
import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from hetkit.errors import LaunchError, ProtocolError
from hetkit.launch.ends import Peer
from hetkit.launch.orders import (
    AnyEvent,
    Event,
    Exited,
    Fork,
    Forked,
    Imported,
    Kill,
    NurseryLost,
    Output,
    Preload,
    Surroundings,
    WorkerStart,
    frame,
)
from hetkit.launch.outbox import Outbox
from hetkit.launch.stream import Stream

__all__ = [
    "Event",
    "Exited",
    "Forked",
    "Nursery",
    "NurseryLost",
    "OnEvent",
    "Output",
    "WorkerStart",
    "shared_nursery",
]

log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]
"""Gets `Forked`, `Output`, `Exited` and `NurseryLost` from the nursery's I/O thread."""

_READ_BYTES = 256 << 10
_LAST_WORDS_BYTES = 8 << 10
_LEAVE_S = 4.0
_CLOSED = "the nursery is closed: take a new one by shared_nursery()."


class Nursery:
    """The kernel's handle on a nursery process; made in milliseconds, ready some seconds later.

    Args:
        python: The interpreter to run it with; None for this process's own.

    Raises:
        LaunchError: The interpreter cannot be started.

    Example:
        >>> from hetkit.launch.channel import Peer
        >>> from hetkit.launch.local import Exited, Nursery, WorkerStart
        >>> import queue
        >>> events = queue.SimpleQueue()
        >>> nursery = Nursery()
        >>> start = WorkerStart(session="demo", peer=Peer(1, 0), entry="builtins:print")
        >>> nursery.fork(start, events.put)
        >>> while not isinstance(event := events.get(timeout=60), Exited):
        ...     pass
        >>> event.exitcode
        0
        >>> nursery.close()
    """

    def __init__(self, python: str | None = None) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._listeners: dict[tuple[str, Peer], OnEvent] = {}
        self._obituary: str | None = None
        self._ready = threading.Event()
        self._outbox: Outbox[bytes] = Outbox()
        self._last_words = bytearray()
        self._selector = selectors.DefaultSelector()
        ours, theirs = socket.socketpair()
        self._stream = Stream(ours, AnyEvent, self._selector)
        try:
            self._process = _start(python or sys.executable, theirs)
        except OSError as error:
            self._close_handles()
            raise LaunchError(
                f"the Python interpreter {python or sys.executable!r} cannot be started: {error}"
            ) from error
        finally:
            theirs.close()
        self._thread = threading.Thread(target=self._run, name="hetkit-nursery", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The nursery's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether workers can be forked; False in a process forked from the one that made it."""
        ours = self._owner == os.getpid()
        return ours and self._obituary is None and not self._outbox.closing

    def wait_ready(self, timeout_s: float) -> bool:
        """Returns whether the nursery has imported everything, waiting ``timeout_s`` at most."""
        return self._ready.wait(timeout_s)

    def preload(self, modules: tuple[str, ...]) -> None:
        """Has installed modules imported once for all workers to come; returns at once.

        Modules that lie outside site-packages are left to the workers, for they may be edited.
        """
        if modules:
            self._outbox.put(frame(Preload(modules=modules, surroundings=Surroundings.here())))

    def fork(self, start: WorkerStart, on_event: OnEvent) -> None:
        """Has a worker started, in this process's present surroundings; returns at once.

        Args:
            start: What the worker is told.
            on_event: Gets what becomes of it; called from the nursery's I/O thread.

        Raises:
            LaunchError: The nursery is closed or has died.
        """
        order = frame(Fork(start=start, surroundings=Surroundings.here()))
        with self._lock:
            if self._obituary is not None:
                raise LaunchError(self._obituary)
            self._listeners[start.session, start.peer] = on_event
            if self._owner != os.getpid() or not self._outbox.put(order):
                del self._listeners[start.session, start.peer]
                raise LaunchError(_CLOSED)

    def kill(self, session: str, peer: Peer | None = None) -> None:
        """Has a worker ended (SIGKILL to its process group), or all of a session's."""
        self._outbox.put(frame(Kill(session=session, peer=peer)))

    def close(self) -> None:
        """Ends all workers and the nursery, and waits for them within limits; idempotent."""
        if self._owner != os.getpid():
            return
        self._outbox.finish()
        if not self._ready.is_set():  # still importing: it has no workers, and would not listen
            self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _LEAVE_S)

    # ── the I/O thread ──

    def _run(self) -> None:
        errors = self._process.stdout
        if errors is None:
            raise LaunchError("the nursery was started without a pipe for its errors.")
        os.set_blocking(errors.fileno(), False)
        self._selector.register(self._outbox, selectors.EVENT_READ)
        self._selector.register(errors, selectors.EVENT_READ)
        try:
            while not self._stream.ended and self._turn(errors.fileno()):
                continue
        except ProtocolError as error:
            log.warning("the nursery's stream broke: %s", error)
        self._stream.close()
        self._end()
        self._hear(errors.fileno())
        errors.close()
        self._bury()
        self._close_handles()

    def _turn(self, errors: int) -> bool:
        """Handles what is ready; returns False where a closed nursery takes too long to leave."""
        closing = self._outbox.closing
        ready = self._selector.select(_LEAVE_S if closing else None)
        for key, events in ready:
            if key.fileobj is self._outbox:
                self._pass_orders()
            elif key.data is self._stream:
                if events & selectors.EVENT_WRITE:
                    self._stream.flush()
                if events & selectors.EVENT_READ:
                    for event in self._stream.receive():
                        self._report(event)
            elif not self._hear(errors):
                self._selector.unregister(key.fileobj)
        return bool(ready) or not closing

    def _pass_orders(self) -> None:
        for order in self._outbox.drain():
            self._stream.send_wire(order)
        if self._outbox.closing:
            self._stream.finish()

    def _hear(self, errors: int) -> bool:
        """Takes in what the nursery itself printed; returns False when it has closed its end."""
        try:
            data = os.read(errors, _READ_BYTES)
        except BlockingIOError:
            return True
        if data:
            log.warning("nursery: %s", data.decode(errors="replace").rstrip())
            self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
        return bool(data)

    def _report(self, event: Imported | Forked | Output | Exited) -> None:
        if isinstance(event, Imported):
            log.info("the nursery is ready after %.2f s", event.import_s)
            self._ready.set()
            return
        with self._lock:
            key = event.session, event.peer
            on_event = self._listeners.get(key)
            if isinstance(event, Exited):
                self._listeners.pop(key, None)
        if on_event is not None:
            _tell(on_event, event)

    def _close_handles(self) -> None:
        self._selector.close()
        self._stream.close()
        self._outbox.close()

    def _end(self) -> None:
        """Waits for the process, whose stream has ended, and ends it if it will not go."""
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)

    def _bury(self) -> None:
        if self._outbox.closing:
            self._obituary = _CLOSED
            return
        code = self._process.returncode
        how = "is still there" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        words = self._last_words.decode(errors="replace").strip()
        reason = f"the nursery (pid {self.pid}) {how}" + (f":\n{words}" if words else ".")
        with self._lock:
            self._obituary = reason
            listeners = list(dict.fromkeys(self._listeners.values()))
            self._listeners.clear()
        for on_event in listeners:
            _tell(on_event, NurseryLost(reason=reason))


def shared_nursery() -> Nursery:
    """Returns this process's nursery; made on the first call, and anew when it has died.

    It is closed when the interpreter exits.

    Raises:
        LaunchError: The interpreter cannot be started.
    """
    return _keeper(os.getpid()).nursery()


class _Keeper:
    """Holds one process's nursery."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nursery: Nursery | None = None

    def nursery(self) -> Nursery:
        with self._lock:
            if self._nursery is None or not self._nursery.alive:
                self._nursery = Nursery()
            return self._nursery

    def close(self) -> None:
        with self._lock:
            if self._nursery is not None:
                self._nursery.close()


@functools.cache
def _keeper(pid: int) -> _Keeper:
    # By pid, since a forked process inherits this cache but not its parent's threads.
    keeper = _Keeper()
    atexit.register(keeper.close)
    return keeper


def _start(python: str, theirs: socket.socket) -> "subprocess.Popen[bytes]":
    # -P: a torch.py beside the notebook must not be taken for PyTorch.
    return subprocess.Popen(
        [python, "-P", "-m", "hetkit.worker", str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    """The kernel's, with a way to hetkit itself where it is not installed."""
    environment = dict(os.environ)
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = [environment.get("PYTHONPATH", ""), str(root)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _tell(on_event: OnEvent, event: Event) -> None:
    try:
        on_event(event)
    except Exception:
        log.exception("%s could not be handled", type(event).__name__)
