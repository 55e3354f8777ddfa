"""Every test leaves nothing behind: no process, no thread, no open socket, no file.

A census is taken before each test and compared after it. It must cost next to nothing for a plain
unit test, so the cheap look comes first (a listing of ``/proc`` and of our own descriptors, well
below a millisecond) and the dear one (who made that process, whose event loop is this) only where
something new was seen.
"""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

GRACE_S = 5.0
"""How long what is on its way out may take to be gone."""

MARK = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
"""In the environment of every process that a test starts, so that orphans are found too."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

collect_ignore = ["benchmarks"]  # scripts, not tests; `make bench` runs them


def pytest_configure() -> None:
    """Takes the clock out of hypothesis, and chance out of it on CI."""
    hypothesis.settings.register_profile(
        "hetkit",
        max_examples=int(os.environ.get("HETKIT_TEST_EXAMPLES", "100")),
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("hetkit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, visibly, the tests that need a browser where there is none."""
    if any(shutil.which(name) for name in BROWSERS):
        return
    skip = pytest.mark.skip(reason="no Chromium here; on Debian: apt install chromium")
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(skip)


@dataclass(frozen=True)
class Census:
    """What there is at one moment."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    handles: dict[int, str]
    nursery: int | None
    zmq_context: int | None

    @classmethod
    def take(cls) -> "Census":
        return cls(
            pids=frozenset(int(name) for name in os.listdir("/proc") if name.isdigit()),
            threads=frozenset(threading.enumerate()),
            handles=_handles(),
            nursery=_nursery_pid(),
            zmq_context=_zmq_context(),
        )


def _handles() -> dict[int, str]:
    """Our descriptors of the kinds that a test can forget to close; files are not among them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:")):
            found[int(name)] = target
    return found


# What the process makes once, lazily, and keeps. Each is looked at and never made here.


def _shared_nursery() -> Any:
    local = sys.modules.get("hetkit.launch.local")
    return local._keeper(os.getpid())._nursery if local is not None else None


def _nursery_pid() -> int | None:
    nursery = _shared_nursery()
    return nursery.pid if nursery is not None else None


def _nursery_is_new() -> bool:
    """Whether the shared nursery is so young that its thread may still be opening its selector."""
    pid = _nursery_pid()
    try:
        return pid is not None and time.time() - psutil.Process(pid).create_time() < GRACE_S
    except psutil.NoSuchProcess:
        return False


def _zmq_context() -> int | None:
    zmq = sys.modules.get("zmq")
    return id(zmq.Context._instance) if zmq is not None and zmq.Context._instance else None


def _resource_tracker() -> tuple[int | None, int | None]:
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)


def _event_loop_handles() -> set[int]:
    """Descriptors of open asyncio loops: hetkit has none, Jupyter's libraries keep theirs."""
    found: set[int] = set()
    for thing in gc.get_objects():
        if isinstance(thing, asyncio.SelectorEventLoop) and not thing.is_closed():
            selector, ends = thing._selector, (thing._ssock, thing._csock)  # type: ignore[attr-defined]
            found |= {selector.fileno(), *(end.fileno() for end in ends)}
    return found


def left_processes(before: Census) -> list[psutil.Process]:
    """The living processes that were started since, by us or by a child of ours."""
    excused = {_nursery_pid(), _resource_tracker()[0]}
    found = []
    for pid in Census.take().pids - before.pids - excused:
        try:
            process = psutil.Process(pid)
            if _ours(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _ours(process: psutil.Process) -> bool:
    if os.getpid() in [parent.pid for parent in process.parents()]:
        return True
    if process.status() == psutil.STATUS_ZOMBIE:  # of a dead parent: whoever adopted it reaps it
        return False
    return process.environ().get("HETKIT_TEST_ID") == MARK


def left_threads(before: Census) -> list[str]:
    """Names of our living threads that were started since."""
    if _nursery_pid() != before.nursery:
        return []
    new = set(threading.enumerate()) - before.threads
    return [thread.name for thread in new if thread.name.startswith("hetkit")]


def left_handles(before: Census, excused: set[int]) -> list[str]:
    """Kinds of the descriptors that were opened since and are open still."""
    if _nursery_pid() != before.nursery:
        return []
    now = {fd: target for fd, target in _handles().items() if fd not in excused}
    new = Counter(now.values()) - Counter(before.handles.values())
    if new and (_zmq_context() != before.zmq_context or _nursery_is_new()):
        new = Counter({k: n for k, n in new.items() if not k.startswith("anon_inode:")})
    return sorted(new.elements())


def left_files(folder: Path) -> list[str]:
    """Our entries in the test's temporary folder; the locks' own folder may stay, empty."""
    locks = [folder / f"hetkit-{os.getuid()}", folder / "hetkit"]
    names = [p.name for p in folder.glob("hetkit*") if p not in locks]
    inside = [f"{each.name}/{p.name}" for each in locks if each.is_dir() for p in each.iterdir()]
    return sorted(names + inside)


def leaks(before: Census, folder: Path, excused: set[int]) -> list[str]:
    """What the test left, in words."""
    said = [f"process {p.pid}: {_command(p)}" for p in left_processes(before)]
    said += [f"thread {name}" for name in left_threads(before)]
    said += [f"descriptor {target}" for target in left_handles(before, excused)]
    said += [f"file {name} in the temporary folder" for name in left_files(folder)]
    return said


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return "ended, and nobody has waited for it"
    except psutil.NoSuchProcess:
        return "gone"


def wait_for_leaks(before: Census, folder: Path) -> list[str]:
    """What is left after the grace time; looks closer only where a first look saw something."""
    found = leaks(before, folder, set())
    if not found:
        return []
    gc.collect()
    tracker = _resource_tracker()[1]
    excused = _event_loop_handles() | ({tracker} if tracker is not None else set())
    deadline = time.monotonic() + GRACE_S
    while (found := leaks(before, folder, excused)) and time.monotonic() < deadline:
        time.sleep(0.02)
        subprocess._cleanup()  # type: ignore[attr-defined]  # waits for what was dropped and ended
    return found


def end_processes(processes: list[psutil.Process]) -> None:
    """Ends what a failing test left, so that the next one starts clean."""
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    psutil.wait_procs(processes, timeout=GRACE_S)


@pytest.fixture(scope="session", autouse=True)
def _whole_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gives the run a temporary folder with a short name; closes the shared nursery at its end.

    Short, because a Unix socket's path may have 107 characters. The tests' folders stay until the
    end (empty): the shared nursery keeps the temporary folder of the test that started it.
    """
    kept = {name: os.environ.get(name) for name in ("TMPDIR", "XDG_RUNTIME_DIR", "HETKIT_TEST_ID")}
    tmp_path_factory.getbasetemp()  # before TMPDIR moves: pytest's own folder is not a test's
    root = Path(tempfile.mkdtemp(prefix="hk"))
    before = Census.take()
    os.environ["HETKIT_TEST_ID"] = MARK
    yield root
    nursery = _shared_nursery()
    if nursery is not None:
        nursery.close()
    left = left_processes(before)
    end_processes(left)
    for name, value in kept.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    tempfile.tempdir = None
    shutil.rmtree(root, ignore_errors=True)
    if left:
        pytest.fail(f"the run left processes: {[p.pid for p in left]}", pytrace=False)


@pytest.fixture(autouse=True)
def _leaves_nothing(_whole_run: Path) -> Iterator[None]:
    """Fails a test that leaves a process, one of our threads, a descriptor or a file of ours."""
    folder = _whole_run / f"{len(os.listdir(_whole_run))}"
    folder.mkdir(mode=0o700)
    os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = tempfile.tempdir = str(folder)
    before = Census.take()
    yield
    found = wait_for_leaks(before, folder)
    if found:
        end_processes(left_processes(before))
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
