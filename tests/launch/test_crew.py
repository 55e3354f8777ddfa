from dataclasses import replace
from pathlib import Path

import pytest

from hetkit.devices.device import Device
from hetkit.devices.fleet import parse_fleet
from hetkit.errors import LaunchError
from hetkit.launch import messages as m
from hetkit.launch.crew import Crew, Job
from hetkit.launch.ends import Peer


class FakeNursery:
    """Notes what it is told."""

    def __init__(self):
        self.alive = True
        self.starts = []
        self.killed = []

    def fork(self, start, on_event):
        self.starts.append(start)

    def kill(self, session, peer=None):
        self.killed.append((session, peer))


def job(devices="cpu*2", **changes):
    made = Job(
        devices=tuple(parse_fleet(devices)), payload=Path("/x.task"), seed=3, global_batch=16
    )
    return replace(made, **changes)


@pytest.fixture
def nursery():
    return FakeNursery()


@pytest.fixture
def crew(nursery, tmp_path):
    made = Crew("mine", tmp_path, lambda incoming: None, lambda: nursery)
    yield made
    made.close()


def ready(rank):
    return m.Ready(
        rank=rank,
        generation=1,
        samples=64,
        step=0,
        epoch=0,
        epoch_first_step=0,
        parameters=4,
        parameter_bytes=16,
    )


def test_each_start_is_a_generation_of_its_own(crew, nursery):
    crew.start(job())
    crew.start(job())
    peers = [start.peer for start in nursery.starts]
    assert peers == [Peer(1, 0), Peer(1, 1), Peer(2, 0), Peer(2, 1)]
    assert {start.session for start in nursery.starts} == {"mine"}
    assert len({start.endpoint for start in nursery.starts}) == 1, "one channel for all"


def test_workers_share_the_cores_and_count_cards_by_their_slots(crew, nursery, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    crew.start(job())
    assert nursery.starts[0].env == {"OMP_NUM_THREADS": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    crew.start(job("cpu*8"))
    assert nursery.starts[-1].env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    crew.start(job())
    assert nursery.starts[-1].env["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST", "the user's own choice"


def test_it_is_ready_when_the_last_rank_is_in_whatever_order_they_come(crew):
    crew.start(job())
    assert crew.hear(Peer(1, 1), ready(1)) is None
    assert [each.rank for each in crew.hear(Peer(1, 0), ready(0))] == [0, 1]


def test_another_version_of_the_messages_is_refused_with_a_way_out(crew):
    crew.start(job())
    hello = m.Hello(rank=1, generation=1, pid=7, protocol=m.PROTOCOL + 1)
    with pytest.raises(LaunchError, match=r"rank 1 speaks version \d+.*install the same hetkit"):
        crew.hear(Peer(1, 1), hello)


def test_all_are_here_when_the_last_has_said_hello(crew):
    """From then on the user's own code runs, which may take as long as it likes."""
    for generation in (1, 2):
        crew.start(job())
        for rank in (0, 1):
            assert not crew.all_here
            crew.hear(Peer(generation, rank), m.Hello(rank=rank, generation=generation, pid=7))
        assert crew.all_here


def test_only_living_workers_are_ended(crew, nursery):
    crew.kill()
    assert nursery.killed == []
    crew.start(job())
    crew.kill()
    assert nursery.killed == [("mine", None)]
    nursery.alive = False
    crew.kill()
    assert len(nursery.killed) == 1


def test_nobody_is_joined_before_the_start(crew):
    with pytest.raises(LaunchError, match="not started yet"):
        crew.tell(m.Leave())


def test_closing_twice_is_fine_and_nothing_is_sent_after(crew):
    crew.start(job())
    crew.close()
    crew.close()
    crew.tell(m.Leave())


def test_inline_has_a_link_of_its_own_in_each_generation(tmp_path):
    heard = []
    crew = Crew("inline", tmp_path, heard.append, None)
    crew.start(job("cpu"))
    first = crew.link
    crew.hear(Peer(1, 0), m.Hello(rank=0, generation=1, pid=7))
    join = first.receive(0)
    assert (join.rank, join.world_size, join.seed, join.snapshot) == (0, 1, 3, None)
    crew.start(job("cpu", snapshot=Path("/s.ckpt")))
    assert crew.link is not first
    assert first.receive(0) is None
    crew.close()


def cuda(index):
    return Device(name="T4", kind="cuda", index=index, key=f"cuda:{index}")


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ((cuda(0), cuda(1)), "nccl"),
        ((cuda(0),), "gloo"),
        (tuple(parse_fleet("cpu*2")), "gloo"),
        ((cuda(0), *parse_fleet("cpu")), "gloo"),
    ],
)
def test_nccl_is_for_cards_only(devices, backend):
    assert job(devices=devices).backend == backend


class Sent:
    """A hub that notes what it is given."""

    def __init__(self):
        self.to = {}

    def send(self, peer, message):
        self.to.setdefault(peer.rank, []).append(type(message).__name__)

    def close(self):
        pass


def test_a_rank_that_comes_late_still_hears_where_the_others_meet(crew, monkeypatch):
    """A message to a peer that has not connected is lost: the start once hung until its limit."""
    crew.start(job())
    sent = Sent()
    monkeypatch.setattr(crew, "_hub", sent)
    crew.hear(Peer(1, 0), m.Hello(rank=0, generation=1, pid=7))
    crew.hear(Peer(1, 0), m.StoreReady(generation=1, port=1234))
    crew.hear(Peer(1, 1), m.Hello(rank=1, generation=1, pid=8))
    assert sent.to == {0: ["Join", "Rendezvous"], 1: ["Join", "Rendezvous"]}
