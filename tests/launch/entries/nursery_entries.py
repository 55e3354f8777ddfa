"""What the workers of these tests do; imported in them by name."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def report(start):
    """Tells what the worker finds around it."""
    facts = {
        "threads": threading.active_count(),
        "cwd": os.getcwd(),
        "path": sys.path,
        "extra": os.environ.get("HETKIT_TEST"),
        "kernel": os.environ.get("HETKIT_TEST_KERNEL"),
        "pgid": os.getpgrp(),
        "pid": os.getpid(),
        "sid": os.getsid(0),
        "torch": "torch" in sys.modules,
        "main": sorted(vars(sys.modules["__main__"])),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "stdin": sys.stdin.read(),
        "fds": list(open_files()),
        "name": Path("/proc/self/comm").read_text().strip(),
    }
    print(json.dumps(facts))


def open_files():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            yield os.readlink(f"/proc/self/fd/{fd}")


def sleep(start):
    print("up", flush=True)
    time.sleep(600)


def family(start):
    """A worker with a child of its own, such as a DataLoader's."""
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    time.sleep(600)


def fork_family(start):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    print("child", pid, flush=True)
    time.sleep(600)


def flood(start):
    line = "x" * 99 + "\n"
    for _ in range(200_000):  # 20 MB
        sys.stdout.write(line)
    print("the flood's end")


def junk(start):
    sys.stdout.flush()
    os.write(1, bytes(range(256)) * 8)
    text = "größer → 日本語 🙂\n".encode() * 200
    for place in range(0, len(text), 7):  # characters cut in two
        os.write(2, text[place : place + 7])
        time.sleep(0.0005)


def last_words(start):
    print("out: last words", flush=True)
    os.write(2, b"err: last words")
    os.kill(os.getpid(), signal.SIGKILL)


def crash(start):
    import ctypes

    ctypes.string_at(0)


def wrong(start):
    raise KeyError("lost in the worker")


def leave(start):
    sys.exit(7)


def unflushed(start):
    sys.stdout.write("no newline at the end")


def close_streams(start):
    os.close(1)
    os.close(2)
    time.sleep(0.3)
    sys.exit(3)


def import_local(start):
    import hetkit_local_module

    print(hetkit_local_module.WORD)


def preloaded(start):
    print(sorted({"wave", "hetkit_local_module"} & set(sys.modules)))


def burn(start):
    print("up", flush=True)
    while True:
        pass


def stopped_in_time(start):
    print("up", flush=True)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGSTOP)


def endless_flood(start):
    while True:
        sys.stdout.write("x" * 1000 + "\n")


def slow_flood(start):
    for _ in range(30):
        sys.stdout.write(("x" * 99 + "\n") * 2000)
        time.sleep(0.05)
    print("the flood's end")


def deaf(start):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("up", flush=True)
    while True:
        time.sleep(1)


def hog(start):
    """Holds the interpreter's lock, so that no other thread of the worker runs."""
    import ctypes

    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    time.sleep(0.1)
    ctypes.PyDLL(None).sleep(600)


def share(start):
    """Reads all of a payload's data and tells what its map costs, once all workers have it."""
    from hetkit.launch.payload import load

    task = load(os.environ["HETKIT_TEST_PAYLOAD"])
    good = task["array"].sum() == task["array"].size
    good = good and task["tensor"].sum().item() == task["tensor"].numel()
    meet(start, "read")
    pss = map_pss_bytes(".arrays")
    meet(start, "measured")
    task["array"][0] = start.peer.rank
    meet(start, "written")
    good = good and task["array"][0] == start.peer.rank
    print("good" if good else "bad", pss)


def meet(start, place):
    """Waits until all workers have come to the same place."""
    Path(start.folder, f"{place}-{start.peer.rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path(start.folder).glob(f"{place}-*"))) < int(os.environ["HETKIT_TEST_WORKERS"]):
        if time.monotonic() > deadline:
            raise TimeoutError(place)
        time.sleep(0.01)


def map_pss_bytes(suffix):
    """Returns this process's proportional share of the files whose name ends so."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(suffix)
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total
