import selectors
import socket

import pytest

from hetkit.launch.channel import Peer
from hetkit.launch.orders import AnyEvent, AnyOrder, Exited, Kill, Output
from hetkit.launch.stream import Stream


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with selectors.DefaultSelector() as here, selectors.DefaultSelector() as there:
        kernel, nursery = Stream(one, AnyEvent, here), Stream(other, AnyOrder, there)
        yield kernel, nursery, here, there
        kernel.close()
        nursery.close()


def awaited(selector):
    return [key.events for key in selector.get_map().values()]


def test_what_the_other_end_does_not_take_is_held_and_sent_later(pair):
    kernel, nursery, here, there = pair
    event = Output(session="s", peer=Peer(1, 0), stream="stdout", text="x" * 10_000)
    for _ in range(200):
        nursery.send(event)
    assert nursery.backlog_bytes > 1e6
    assert awaited(there) == [selectors.EVENT_READ | selectors.EVENT_WRITE]
    got = []
    while len(got) < 200:
        assert here.select(20)
        got += kernel.receive()
        nursery.flush()
    assert got == [event] * 200
    assert nursery.backlog_bytes == 0
    assert awaited(there) == [selectors.EVENT_READ]
    assert list(kernel.receive()) == []


def test_an_end_is_seen_after_all_that_was_sent_and_the_other_way_stays_open(pair):
    kernel, nursery, _, there = pair
    kernel.send(Kill(session="s"))
    kernel.finish()
    assert list(nursery.receive()) == [Kill(session="s")]
    assert not nursery.ended
    assert list(nursery.receive()) == []
    assert nursery.ended
    assert awaited(there) == []
    nursery.send(Exited(session="s", peer=Peer(1, 0), pid=1, exitcode=0))
    assert [type(event) for event in kernel.receive()] == [Exited]


def test_a_broken_stream_drops_what_nobody_will_read(pair):
    kernel, nursery, _, _ = pair
    for _ in range(200):
        nursery.send(Output(session="s", peer=Peer(1, 0), stream="stdout", text="x" * 10_000))
    kernel.close()
    nursery.flush()
    assert nursery.backlog_bytes == 0
    nursery.finish()
    assert list(nursery.receive()) == []
    assert nursery.ended
