"""Nothing is left behind: the ends of the kernel, of the nursery and of a worker, by SIGKILL."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hetkit.launch.channel import Peer
from hetkit.launch.local import Exited, Nursery, NurseryLost, Output, WorkerStart
from hetkit.launch.orders import (
    AnyEvent,
    Fork,
    Forked,
    Imported,
    Surroundings,
    Unframer,
    frame,
)

WAIT_S = 60
GONE_S = 5
ENTRIES = Path(__file__).parents[1] / "launch" / "entries"

KERNEL = """
import json, queue, sys, threading, time
sys.path.insert(0, sys.argv[1])
from hetkit.launch.channel import Peer
from hetkit.launch.local import Forked, Nursery, Output, WorkerStart
events, pids, words = queue.SimpleQueue(), [], []
nursery = Nursery()
pids.append(nursery.pid)
for rank, entry in enumerate(sys.argv[2:]):
    nursery.fork(WorkerStart(session="s", peer=Peer(1, rank), entry="nursery_entries:" + entry),
                 events.put)
while len(words) < len(sys.argv[2:]):
    event = events.get(timeout=60)
    if isinstance(event, Forked):
        pids.append(event.pid)
    if isinstance(event, Output):
        words.append(event.text)
pids += [int(word.split()[1]) for word in words if word.startswith("child")]
print(json.dumps(pids), flush=True)
{then}
"""


def alive(pids):
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def left_after(pids, within_s):
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(pids)


@pytest.fixture
def start_kernel():
    kernels = []

    def start(*entries, then="time.sleep(600)"):
        command = [sys.executable, "-c", KERNEL.replace("{then}", then), str(ENTRIES), *entries]
        kernel = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        kernels.append(kernel)
        pids = json.loads(kernel.stdout.readline())
        assert alive(pids) == pids
        return kernel, pids

    yield start
    for kernel in kernels:
        kernel.kill()
        kernel.wait(WAIT_S)
        kernel.stdout.close()


@pytest.mark.parametrize(
    "entries",
    [("family", "fork_family"), ("burn", "stopped_in_time"), ("endless_flood", "deaf")],
)
def test_kill_9_of_the_kernel_leaves_nothing(start_kernel, entries):
    kernel, pids = start_kernel(*entries)
    kernel.kill()
    kernel.wait(WAIT_S)
    assert left_after(pids, GONE_S) == []


def test_kill_9_of_a_kernel_whose_child_holds_the_socket_leaves_nothing(start_kernel):
    # A process forked from the kernel keeps the stream open: only the parent's death tells then.
    then = "import os; pid = os.fork(); print(pid or '', flush=True); time.sleep(600)"
    kernel, pids = start_kernel("family", "family", then=then)
    child = int(kernel.stdout.readline().strip() or kernel.stdout.readline())
    try:
        kernel.kill()
        kernel.wait(WAIT_S)
        assert left_after(pids, GONE_S) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_kernel_that_ends_in_good_order_leaves_nothing(start_kernel):
    kernel, pids = start_kernel("family", "sleep", then="")
    assert kernel.wait(WAIT_S) == 0
    assert left_after(pids, GONE_S) == []


@pytest.mark.parametrize(
    "entries", [("family", "fork_family"), ("burn", "hog"), ("stopped_in_time",)]
)
def test_kill_9_of_the_nursery_leaves_nothing(monkeypatch, entries):
    monkeypatch.syspath_prepend(str(ENTRIES))
    events = queue.SimpleQueue()
    nursery = Nursery()
    pids, words = [nursery.pid], []
    for rank, entry in enumerate(entries):
        start = WorkerStart(session="s", peer=Peer(1, rank), entry=f"nursery_entries:{entry}")
        nursery.fork(start, events.put)
    while len(words) < len(entries):
        event = events.get(timeout=WAIT_S)
        if isinstance(event, Forked):
            pids.append(event.pid)
        if isinstance(event, Output):
            words.append(event.text)
    pids += [int(word.split()[1]) for word in words if word.startswith("child")]
    time.sleep(0.2)  # lets the one that stops itself stop
    os.kill(nursery.pid, signal.SIGKILL)
    lost = events.get(timeout=WAIT_S)
    assert isinstance(lost, NurseryLost)
    assert "SIGKILL" in lost.reason
    assert left_after(pids, GONE_S) == []
    assert not nursery.alive
    nursery.close()


def test_an_interrupt_of_its_group_does_not_end_the_nursery(monkeypatch):
    monkeypatch.syspath_prepend(str(ENTRIES))
    events = queue.SimpleQueue()
    nursery = Nursery()
    assert nursery.wait_ready(WAIT_S)
    os.kill(nursery.pid, signal.SIGINT)
    start = WorkerStart(session="s", peer=Peer(1, 0), entry="nursery_entries:leave")
    nursery.fork(start, events.put)
    while not isinstance(event := events.get(timeout=WAIT_S), Exited):
        continue
    assert event.exitcode == 7
    nursery.close()


def test_a_kernel_that_does_not_read_wedges_no_worker(monkeypatch):
    """A full socket holds output back within bounds; what happened is told in full, later."""
    monkeypatch.syspath_prepend(str(ENTRIES))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "hetkit.worker", str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    unframer = Unframer(AnyEvent)
    events = []

    def read_until(kind, count):
        ours.settimeout(WAIT_S)
        while sum(isinstance(event, kind) for event in events) < count:
            data = ours.recv(1 << 16)
            assert data, "the nursery has ended"
            events.extend(unframer.feed(data))

    try:
        read_until(Imported, 1)
        count = 6
        for rank in range(count):
            start = WorkerStart(session="s", peer=Peer(1, rank), entry="nursery_entries:slow_flood")
            ours.sendall(frame(Fork(start=start, surroundings=Surroundings.here())))
        read_until(Forked, count)
        pids = [event.pid for event in events if isinstance(event, Forked)]
        deadline = time.monotonic() + WAIT_S
        # Unread, yet they run to their end: they are buried at once, so they are simply gone.
        assert left_after(pids, deadline - time.monotonic()) == []
        resident_bytes = psutil.Process(process.pid).memory_info().rss
        read_until(Exited, count)
        for rank in range(count):
            texts = [e.text for e in events if isinstance(e, Output) and e.peer.rank == rank]
            assert "".join(texts).endswith("the flood's end\n")
        assert sum(len(e.text) for e in events if isinstance(e, Output)) < 10e6
        assert resident_bytes < 1e9
    finally:
        ours.close()
        assert process.wait(WAIT_S) == 0
