"""From the fork to the worker's own work: how a child of the nursery becomes a worker.

The nursery holds the only writing end of the *life pipe*. When the nursery is gone, for whatever
reason, every worker reads its end there and ends its own process group, DataLoader children too.
"""

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

from hetkit.launch.orders import WorkerStart

_F_SETSIG = 10  # asm-generic/fcntl.h; the module fcntl does not name it


def become_worker(
    start: WorkerStart, *, stdout: int, stderr: int, life: int, inherited: Iterable[int]
) -> NoReturn:
    """Runs the worker to its end in this freshly forked process, and exits.

    Args:
        start: What the worker is told.
        stdout: Pipe for its output.
        stderr: Pipe for its errors.
        life: Reading end of the life pipe.
        inherited: The nursery's file descriptors, which a worker must not hold.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        _reset_signals()
        _take_streams(stdout, stderr)
        for fd in inherited:
            os.close(fd)
        _watch(life)
        _take_name(start)
        code = _work(start)
    except BaseException:  # noqa: BLE001  (nothing may unwind into the nursery's own frames)
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def resolve(entry: str) -> Any:
    """Returns the function that ``entry`` names as ``module:name``."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_streams(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        text = open(  # noqa: SIM115  (stays open as long as the process)
            fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    faulthandler.enable()


def _watch(life: int) -> None:
    """Ends this process's group when the nursery is gone: by a thread, and by the OS.

    The thread needs the interpreter's lock, which an extension may hold; the OS needs nothing, but
    signals only a death that comes after it was asked (``fcntl(2)``, F_SETSIG). Opened anew, since
    whom to signal belongs to an open file, which all workers would share.
    """
    own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)

    def wait() -> None:
        while os.read(life, 1):
            continue
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="hetkit-life", daemon=True).start()


def _take_name(start: WorkerStart) -> None:
    # A clean __main__: nothing that the worker starts may run the nursery's again.
    sys.modules["__main__"] = types.ModuleType("__main__")
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"hetkit-rank{start.peer.rank}")


def _work(start: WorkerStart) -> int:
    os.environ.update(start.env)
    try:
        for name in start.preload:
            import_module(name)
        resolve(start.entry)(start)
    except SystemExit as leave:
        if isinstance(leave.code, str):
            sys.stderr.write(leave.code + "\n")
            return 1
        return leave.code or 0
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
