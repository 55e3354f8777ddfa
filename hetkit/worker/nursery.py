"""The nursery: a process that has imported PyTorch once and forks a worker whenever one is needed.

::

    kernel ◀── socket pair ──▶ nursery ◀── stdout, stderr ── worker, in a process group of its own
                                 └──────── life pipe ──────▶   └── its DataLoader processes

It runs no torch operation and never touches a GPU, so a child starts with a clean state. It has one
thread (a fork copies only the calling one) and never waits for anybody: workers' output is always
read, and what the kernel does not take is held within bounds. When the kernel is gone, it ends all
groups and leaves.
"""

import contextlib
import gc
import importlib.util
import itertools
import logging
import os
import selectors
import signal
import socket
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from hetkit.launch.ends import Peer
from hetkit.launch.orders import (
    AnyOrder,
    Event,
    Exited,
    Fork,
    Forked,
    Imported,
    Kill,
    Output,
    Preload,
    Unframer,
    WorkerStart,
    frame,
)
from hetkit.worker.child import become_worker
from hetkit.worker.drain import READ_BYTES, Allowance, Drain

log = logging.getLogger(__name__)

# torch._dynamo: otherwise each worker's first optimizer step imports it (EVIDENCE §1).
ONCE = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "numpy",
    "cloudpickle",
    "zmq",
)
_BACKLOG_MAX_BYTES = 1 << 20
_PARENT_CHECK_S = 1.0
_HELD_CHECK_S = 0.05
_LEAVE_S = 2.0


def main(arguments: list[str]) -> None:
    """Runs the nursery: ``python -m hetkit.worker FD PARENT_PID``."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    gc.disable()  # nothing of this becomes garbage, and a scan would touch every page
    for name in ONCE:
        import_module(name)
    gc.freeze()
    gc.enable()
    nursery = Nursery(control, parent=int(arguments[1]))
    nursery.tell(Imported(import_s=time.monotonic() - began))
    nursery.serve()


class _Worker:
    """A living child."""

    def __init__(self, session: str, peer: Peer, pid: int, stdout: int, stderr: int) -> None:
        allowance = Allowance()
        self.session = session
        self.peer = peer
        self.pid = pid
        self.drains = (Drain(stdout, "stdout", allowance), Drain(stderr, "stderr", allowance))

    def kill(self) -> None:
        # The pid is ours until it is waited for, so this cannot hit anybody else's group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Nursery:
    """The loop over the kernel's orders, the workers' output and their deaths.

    Args:
        control: This end of the socket pair with the kernel.
        parent: The kernel's pid.
    """

    def __init__(self, control: socket.socket, parent: int) -> None:
        control.setblocking(False)
        self._control = control
        self._parent = parent
        self._workers: dict[int, _Worker] = {}
        self._unframer = Unframer(AnyOrder)
        self._outbox: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._life_read, self._life_write = os.pipe()
        self._bell, self._bell_end = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_end.setblocking(False)
        signal.set_wakeup_fd(self._bell_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._awaited = selectors.EVENT_READ
        self._leaving = False

    def tell(self, event: Event) -> None:
        """Queues an event for the kernel."""
        wire = frame(event)
        self._outbox.append(wire)
        self._backlog_bytes += len(wire)
        self._flush()

    def serve(self) -> None:
        """Serves until the kernel is gone or has closed its end, then ends all workers."""
        while not self._leaving:
            self._turn()
            if os.getppid() != self._parent:
                self._leaving = True
        deadline = time.monotonic() + _LEAVE_S
        for worker in self._workers.values():
            worker.kill()
        while (self._workers or self._outbox) and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        holds = any(drain.holds for w in self._workers.values() for drain in w.drains)
        for key, events in self._selector.select(_HELD_CHECK_S if holds else _PARENT_CHECK_S):
            handle: Callable[[int], None] = key.data
            handle(events)
        now_s = time.monotonic()
        for worker in self._workers.values():
            for drain in worker.drains:
                if self._backlog_bytes < _BACKLOG_MAX_BYTES:
                    self._show(worker, drain.stream, drain.pass_on(now_s))

    def _show(self, worker: _Worker, stream: str, text: str) -> None:
        if text:
            self.tell(Output(session=worker.session, peer=worker.peer, stream=stream, text=text))

    # ── the kernel ──

    def _on_control(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if not events & selectors.EVENT_READ or self._leaving:
            return
        try:
            data = self._control.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave()
        for order in self._unframer.feed(data):
            self._obey(order)

    def _leave(self) -> None:
        self._leaving = True
        self._await(reading=False, writing=bool(self._outbox))

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = self._control.send(self._outbox[0])
                self._backlog_bytes -= sent
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the kernel is gone: nobody will ever read this
            self._outbox.clear()
            self._backlog_bytes = 0
            self._leaving = True
        self._await(reading=not self._leaving, writing=bool(self._outbox))

    def _await(self, *, reading: bool, writing: bool) -> None:
        events = selectors.EVENT_READ * reading | selectors.EVENT_WRITE * writing
        if events == self._awaited:
            return
        if self._awaited:
            self._selector.unregister(self._control)
        if events:
            self._selector.register(self._control, events, self._on_control)
        self._awaited = events

    def _obey(self, order: Preload | Fork | Kill) -> None:
        if isinstance(order, Kill):
            for worker in self._workers.values():
                if worker.session == order.session and order.peer in (None, worker.peer):
                    worker.kill()
            return
        order.surroundings.enter()
        if isinstance(order, Preload):
            self._preload(order.modules)
        else:
            self._preload(order.start.preload)
            self._fork(order.start)

    def _preload(self, names: tuple[str, ...]) -> None:
        if self._workers:  # they must not wait for an import; the new worker imports by itself
            return
        for name in names:
            if name in sys.modules or not _is_installed(name):
                continue
            try:
                import_module(name)
            except Exception:
                log.exception("%s could not be preloaded; each worker tries by itself", name)
            _refuse_gpu(name)
        gc.freeze()

    # ── the workers ──

    def _fork(self, start: WorkerStart) -> None:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (out_read, out_write, err_read, err_write):
                os.close(fd)
            text = f"the worker could not be forked: {error}\n"
            session, peer = start.session, start.peer
            self.tell(Output(session=session, peer=peer, stream="stderr", text=text))
            self.tell(Exited(session=session, peer=peer, pid=None, exitcode=1))
            return
        if pid == 0:
            become_worker(
                start,
                stdout=out_write,
                stderr=err_write,
                life=self._life_read,
                inherited=itertools.chain((out_read, err_read), self._own_fds()),
            )
        with contextlib.suppress(OSError):  # it has done so itself, and gone on already
            os.setpgid(pid, pid)  # here too: an order to kill it may come before
        os.close(out_write)
        os.close(err_write)
        worker = _Worker(start.session, start.peer, pid, out_read, err_read)
        self._workers[pid] = worker
        for drain in worker.drains:
            self._selector.register(drain.fd, selectors.EVENT_READ, self._reader(drain))
        self.tell(Forked(session=start.session, peer=start.peer, pid=pid))

    def _own_fds(self) -> Iterator[int]:
        """What only the nursery may hold. The epoll set is shared with it: close, never change."""
        yield self._control.detach()
        yield self._bell.detach()
        yield self._bell_end.detach()
        yield self._life_write
        for worker in self._workers.values():
            for drain in worker.drains:
                yield drain.fd
        self._selector.close()

    def _reader(self, drain: Drain) -> Callable[[int], None]:
        def read(events: int) -> None:
            if drain.read() == 0:
                self._selector.unregister(drain.fd)

        return read

    def _on_bell(self, events: int) -> None:
        self._bell.recv(READ_BYTES)
        for worker in list(self._workers.values()):
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, worker.pid, flags) is not None:
                self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        worker.kill()  # what is left of its group, while its pid is still ours
        _, status = os.waitpid(worker.pid, 0)
        del self._workers[worker.pid]
        for drain in worker.drains:
            if drain.fd in self._selector.get_map():
                self._selector.unregister(drain.fd)
            self._show(worker, drain.stream, drain.finish())
        code = os.waitstatus_to_exitcode(status)
        self.tell(
            Exited(
                session=worker.session,
                peer=worker.peer,
                pid=worker.pid,
                exitcode=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        )


def _refuse_gpu(name: str) -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        raise SystemExit(
            f"importing {name} initialises the GPU, which forked workers could not use then: "
            "leave it out of preload."
        )


def _is_installed(name: str) -> bool:
    """Whether a module is not one that its user edits: those each worker imports afresh."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin)
    homes = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    return "site-packages" in origin.parts or any(origin.is_relative_to(home) for home in homes)
