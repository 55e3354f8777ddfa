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
import itertools
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator

from hetkit.launch.ends import Peer
from hetkit.launch.orders import (
    AnyOrder,
    Exited,
    Fork,
    Forked,
    Imported,
    Kill,
    Output,
    Preload,
    WorkerStart,
)
from hetkit.launch.stream import Stream
from hetkit.worker.child import become_worker
from hetkit.worker.drain import Allowance, Drain
from hetkit.worker.imports import import_once, preload

_BACKLOG_MAX_BYTES = 1 << 20
_BELL_BYTES = 4096
_PARENT_CHECK_S = 1.0
_HELD_CHECK_S = 0.05
_LEAVE_S = 2.0


def main(arguments: list[str]) -> None:
    """Runs the nursery: ``python -m hetkit.worker FD PARENT_PID``."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began_s = time.monotonic()
    import_once()
    Nursery(control, parent=int(arguments[1])).serve(Imported(import_s=time.monotonic() - began_s))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing to clean up, and PyTorch takes half a second over it


class _Worker:
    """A living child."""

    def __init__(self, start: WorkerStart, pid: int, stdout: int, stderr: int) -> None:
        allowance = Allowance()
        self.session = start.session
        self.peer: Peer = start.peer
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
        self._parent = parent
        self._workers: dict[int, _Worker] = {}
        self._folders: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._kernel = Stream(control, AnyOrder, self._selector)
        self._life_read, self._life_write = os.pipe()
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        signal.set_wakeup_fd(self._bell_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def serve(self, greeting: Imported) -> None:
        """Serves until the kernel is gone or has closed its end, then ends all workers."""
        self._kernel.send(greeting)
        while not self._kernel.ended and os.getppid() == self._parent:
            self._turn()
        deadline_s = time.monotonic() + _LEAVE_S
        for worker in self._workers.values():
            worker.kill()
        while (self._workers or self._kernel.backlog_bytes) and time.monotonic() < deadline_s:
            self._turn()
        if (
            os.getppid() != self._parent
        ):  # killed: nobody else is left to remove its sessions' files
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _turn(self) -> None:
        holds = any(drain.holds for w in self._workers.values() for drain in w.drains)
        for key, events in self._selector.select(_HELD_CHECK_S if holds else _PARENT_CHECK_S):
            if isinstance(key.data, Drain):
                self._read(key.data)
            elif key.data is self._kernel:
                self._listen(events)
            else:
                self._bury_the_dead()
        now_s = time.monotonic()
        for worker in self._workers.values():
            for drain in worker.drains:
                if self._kernel.backlog_bytes < _BACKLOG_MAX_BYTES:
                    self._show(worker, drain.stream, drain.pass_on(now_s))

    def _listen(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._kernel.flush()
        if events & selectors.EVENT_READ:
            for order in self._kernel.receive():
                self._obey(order)

    def _obey(self, order: Preload | Fork | Kill) -> None:
        if isinstance(order, Kill):
            for worker in self._workers.values():
                if worker.session == order.session and order.peer in (None, worker.peer):
                    worker.kill()
            return
        order.surroundings.enter()
        if not self._workers:  # living ones must not wait for an import; a new one does its own
            preload(order.modules if isinstance(order, Preload) else order.start.preload)
        if isinstance(order, Fork):
            if order.start.folder:
                self._folders.add(order.start.folder)
            self._fork(order.start)

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
            self._tell_unborn(start, error)
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
        self._workers[pid] = _Worker(start, pid, out_read, err_read)
        for drain in self._workers[pid].drains:
            self._selector.register(drain.fd, selectors.EVENT_READ, drain)
        self._kernel.send(Forked(session=start.session, peer=start.peer, pid=pid))

    def _tell_unborn(self, start: WorkerStart, error: OSError) -> None:
        session, peer = start.session, start.peer
        text = f"the worker could not be forked: {error}\n"
        self._kernel.send(Output(session=session, peer=peer, stream="stderr", text=text))
        self._kernel.send(Exited(session=session, peer=peer, pid=None, exitcode=1))

    def _own_fds(self) -> Iterator[int]:
        """What only the nursery may hold. The epoll set is shared with it: close, never change."""
        yield self._kernel.detach()
        yield self._bell.detach()
        yield self._bell_end.detach()
        yield self._life_write
        for worker in self._workers.values():
            for drain in worker.drains:
                yield drain.fd
        self._selector.close()

    def _read(self, drain: Drain) -> None:
        if drain.read() == 0:
            self._selector.unregister(drain.fd)

    def _show(self, worker: _Worker, stream: str, text: str) -> None:
        if text:
            session, peer = worker.session, worker.peer
            self._kernel.send(Output(session=session, peer=peer, stream=stream, text=text))

    def _bury_the_dead(self) -> None:
        self._bell.recv(_BELL_BYTES)
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
        self._kernel.send(
            Exited(
                session=worker.session,
                peer=worker.peer,
                pid=worker.pid,
                exitcode=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        )
