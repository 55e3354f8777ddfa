import logging
import os
import queue
import threading
from pathlib import Path

import pytest
import zmq

from hetkit.errors import LaunchError, ProtocolError
from hetkit.launch.channel import Keys, Peer, ZmqHub, ZmqLink, memory_channel
from hetkit.launch.messages import Grant, Hello, Leave, Notice, Progress, encode

WAIT_S = 20


@pytest.fixture
def arrived():
    return queue.SimpleQueue()


@pytest.fixture
def hub(tmp_path, arrived):
    before = len(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())  # an earlier test's shared nursery may be among them
    hub = ZmqHub(lambda peer, message: arrived.put((peer, message)), tmp_path)
    yield hub
    hub.close()
    hub.close()
    assert not [t for t in set(threading.enumerate()) - threads if t.name.startswith("hetkit-")]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not (tmp_path / "hub").exists()


def hello(peer: Peer) -> Hello:
    return Hello(rank=peer.rank, generation=peer.generation, pid=1)


def connect(hub: ZmqHub, peer: Peer, arrived: queue.SimpleQueue) -> ZmqLink:
    link = ZmqLink(hub.endpoint, hub.keys, peer)
    link.send(hello(peer))
    assert arrived.get(timeout=WAIT_S) == (peer, hello(peer))
    return link


def raw_dealer(context: zmq.Context, hub: ZmqHub, address: bytes, keys: Keys) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.set(zmq.ROUTING_ID, address)
    dealer.set(zmq.CURVE_SERVERKEY, keys.server_public)
    dealer.set(zmq.CURVE_PUBLICKEY, keys.client_public)
    dealer.set(zmq.CURVE_SECRETKEY, keys.client_secret)
    dealer.connect(hub.endpoint)
    return dealer


def test_messages_arrive_in_order_at_the_peer_they_are_for(hub, arrived):
    links = [connect(hub, Peer(1, rank), arrived) for rank in range(3)]
    for until in range(500):
        for rank in range(3):
            hub.send(Peer(1, rank), Grant(until=1000 * rank + until))
    for rank, link in enumerate(links):
        got = [link.receive(WAIT_S) for _ in range(500)]
        assert got == [Grant(until=1000 * rank + until) for until in range(500)]
        assert link.receive(0) is None
        assert link.receive(0.01) is None
        link.close()


def test_last_words_arrive_before_a_link_closes(hub, arrived):
    link = connect(hub, Peer(3, 1), arrived)
    for step in range(200):
        link.send(Notice(rank=1, generation=3, step=step, level="info", text="x" * 1000))
    link.close()
    link.close()
    steps = [arrived.get(timeout=WAIT_S)[1].step for _ in range(200)]
    assert steps == list(range(200))
    assert link.receive(None) is None


def test_leave_is_sent_before_the_hub_closes(hub, arrived):
    link = connect(hub, Peer(1, 0), arrived)
    hub.send(Peer(1, 0), Leave())
    hub.close()
    assert link.receive(WAIT_S) == Leave()
    link.close()


def test_sending_from_many_threads_loses_nothing(hub, arrived):
    link = connect(hub, Peer(1, 0), arrived)

    def send(first: int) -> None:
        for until in range(first, first + 100):
            hub.send(Peer(1, 0), Grant(until=until))

    threads = [threading.Thread(target=send, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    got = sorted(link.receive(WAIT_S).until for _ in range(800))
    assert got == list(range(800))
    for thread in threads:
        thread.join()
    link.close()


def test_a_peer_that_is_not_there_blocks_nobody(hub, arrived):
    for _ in range(1000):
        hub.send(Peer(9, 9), Leave())
    connect(hub, Peer(1, 0), arrived).close()


def test_a_stranger_is_refused_and_logged(hub, arrived, caplog):
    public, secret = zmq.curve_keypair()
    keys = Keys(server_public=hub.keys.server_public, client_public=public, client_secret=secret)
    with zmq.Context() as context, caplog.at_level(logging.WARNING):
        stranger = raw_dealer(context, hub, b"1:0", keys)
        stranger.send(encode(hello(Peer(1, 0))))
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(hub.endpoint)
        plain.send(encode(hello(Peer(1, 0))))
        link = connect(hub, Peer(1, 1), arrived)  # a worker gets in meanwhile
        with pytest.raises(queue.Empty):
            arrived.get(timeout=0.3)
        stranger.close()
        plain.close()
    link.close()
    assert "not a worker of this session" in caplog.text


@pytest.mark.parametrize(
    ("address", "frames"),
    [
        (b"1:0", [b"\xc1 no msgpack"]),
        (b"1:0", [encode(Leave()), b"a second frame"]),
        (b"1:0", [encode(hello(Peer(1, 1)))]),
        (b"1:0", [encode(Progress(rank=0, generation=7, rows=()))]),
        (b"nobody", [encode(Leave())]),
        (b"1:0", [b""]),
    ],
)
def test_what_is_no_message_of_the_sender_is_dropped(hub, arrived, caplog, address, frames):
    with zmq.Context() as context, caplog.at_level(logging.WARNING):
        dealer = raw_dealer(context, hub, address, hub.keys)
        dealer.send_multipart(frames)
        link = connect(hub, Peer(1, 5), arrived)
        dealer.close(linger=1000)
        with pytest.raises(queue.Empty):
            arrived.get(timeout=0.3)
    link.close()
    assert "dropped a message" in caplog.text


def test_a_fault_in_the_handler_ends_no_thread(tmp_path, caplog):
    seen = queue.SimpleQueue()

    def deliver(peer, message):
        seen.put(message)
        raise RuntimeError("a fault of the coordinator")

    hub = ZmqHub(deliver, tmp_path)
    link = connect_only(hub)
    assert seen.get(timeout=WAIT_S)
    link.send(hello(Peer(1, 0)))
    assert seen.get(timeout=WAIT_S)
    link.close()
    hub.close()
    assert "a fault of the coordinator" in caplog.text


def connect_only(hub: ZmqHub) -> ZmqLink:
    link = ZmqLink(hub.endpoint, hub.keys, Peer(1, 0))
    link.send(hello(Peer(1, 0)))
    return link


def test_a_path_too_long_for_a_socket_is_refused():
    with pytest.raises(LaunchError, match="TMPDIR"):
        ZmqHub(lambda peer, message: None, Path("/tmp/" + "x" * 110))


def test_keys_do_not_show_themselves(hub):
    assert hub.keys.client_secret.decode() not in repr(hub.keys) + str(hub.keys)


def test_memory_channel_passes_both_ways_and_ends():
    arrived = []
    hub, link = memory_channel(lambda *item: arrived.append(item), Peer(2, 0))
    link.send(hello(Peer(2, 0)))
    hub.send(Peer(2, 0), Grant(until=4))
    assert arrived == [(Peer(2, 0), hello(Peer(2, 0)))]
    assert link.receive(1) == Grant(until=4)
    assert link.receive(0) is None
    hub.close()
    hub.send(Peer(2, 0), Grant(until=5))
    assert link.receive(None) is None
    link.close()
    link.send(hello(Peer(2, 0)))
    assert len(arrived) == 1


def test_memory_channel_refuses_what_could_not_travel():
    _, link = memory_channel(lambda *item: None)
    with pytest.raises(TypeError):
        link.send(Notice(rank=0, generation=0, step=0, level="info", text=object()))
    with pytest.raises(ProtocolError, match="claims"):
        link.send(hello(Peer(1, 1)))
