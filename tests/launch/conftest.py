import os
import queue
import threading
import time
from pathlib import Path

import psutil
import pytest

from hetkit.launch.channel import Keys, Peer
from hetkit.launch.local import Exited, Nursery, Output, WorkerStart

WAIT_S = 60


class Crew:
    """Forks workers from a nursery and collects what becomes of them."""

    def __init__(self, nursery: Nursery, session: str) -> None:
        self.nursery = nursery
        self.session = session
        self.events = queue.SimpleQueue()
        self.seen = []

    def fork(self, entry: str, rank: int = 0, generation: int = 1, **more) -> Peer:
        peer = Peer(generation, rank)
        keys = Keys(server_public=b"SP" * 20, client_public=b"CP" * 20, client_secret=b"CS" * 20)
        start = WorkerStart(
            session=self.session, peer=peer, keys=keys, entry=f"nursery_entries:{entry}", **more
        )
        self.nursery.fork(start, self.events.put)
        return peer

    def await_event(self, kind: type, peer: Peer | None = None, count: int = 1):
        """Returns the last of ``count`` events of a kind."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = [e for e in self.seen if isinstance(e, kind)]
            found = [e for e in found if peer is None or e.peer == peer]
            if len(found) >= count:
                return found[count - 1]
            self.seen.append(self.events.get(timeout=deadline - time.monotonic()))

    def await_text(self, word: str, peer: Peer) -> None:
        deadline = time.monotonic() + WAIT_S
        while word not in self.text(peer):
            self.seen.append(self.events.get(timeout=deadline - time.monotonic()))

    def text(self, peer: Peer, stream: str = "stdout") -> str:
        outputs = [e for e in self.seen if isinstance(e, Output)]
        return "".join(e.text for e in outputs if e.peer == peer and e.stream == stream)

    def run(self, entry: str, **more) -> Exited:
        return self.await_event(Exited, self.fork(entry, **more))


@pytest.fixture(scope="module")
def nursery():
    before = len(os.listdir("/proc/self/fd"))
    nursery = Nursery()
    yield nursery
    pid = nursery.pid
    nursery.close()
    nursery.close()
    assert not nursery.alive
    assert gone([pid])
    assert not [t.name for t in threading.enumerate() if t.name == "hetkit-nursery"]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def crew(nursery, monkeypatch, request):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "entries"))
    crew = Crew(nursery, request.node.name)
    yield crew
    nursery.kill(crew.session)


def gone(pids, within_s: float = 10.0) -> bool:
    """Whether none of some processes is alive after a while (a zombie is not)."""
    deadline = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Alive:
    gone = staticmethod(gone)
    is_alive = staticmethod(is_alive)


@pytest.fixture
def alive() -> Alive:
    return Alive()
