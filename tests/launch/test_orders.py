import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import ProtocolError
from hetkit.launch.channel import Keys, Peer
from hetkit.launch.orders import (
    AnyEvent,
    AnyOrder,
    Exited,
    Fork,
    Kill,
    Output,
    Preload,
    Surroundings,
    Unframer,
    WorkerStart,
    frame,
)

KEYS = Keys(server_public=b"s", client_public=b"c", client_secret=b"x")
HERE = Surroundings(folder=b"/tmp/\xff", path=(b"", b"\xff"), environ=((b"A", b"\xff"),))
START = WorkerStart(session="s", peer=Peer(1, 2), keys=KEYS, env={"ä": "ö"}, preload=("wave",))
ORDERS = [
    Preload(modules=("wave",), surroundings=HERE),
    Fork(start=START, surroundings=HERE),
    Kill(session="s", peer=Peer(1, 2)),
    Kill(session="s"),
]


@given(st.lists(st.integers(1, 50)))
def test_a_stream_comes_back_however_it_is_cut(cuts):
    wire = b"".join(frame(order) for order in ORDERS)
    unframer, got = Unframer(AnyOrder), []
    for cut in cuts:
        got += unframer.feed(wire[:cut])
        wire = wire[cut:]
    got += unframer.feed(wire)
    assert got == ORDERS
    assert isinstance(got[1].start.peer, Peer)


@pytest.mark.parametrize(
    "wire", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", frame(Kill(session="s"))]
)
def test_another_stream_is_refused(wire):
    with pytest.raises(ProtocolError):
        list(Unframer(AnyEvent).feed(wire))


def test_events_keep_their_types():
    events = [
        Output(session="s", peer=Peer(1, 0), stream="stdout", text="🙂"),
        Exited(session="s", peer=Peer(1, 0), pid=7, signal=9),
    ]
    assert list(Unframer(AnyEvent).feed(b"".join(map(frame, events)))) == events


def test_surroundings_are_taken_and_entered(monkeypatch, tmp_path):
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETKIT_TEST", "kept")
    here = Surroundings.here()
    os.environ["HETKIT_TEST"] = "changed"
    os.environ["HETKIT_TEST_MORE"] = "new"
    sys.path.append("/elsewhere")
    os.chdir("/")
    here.enter()
    assert os.environ["HETKIT_TEST"] == "kept"
    assert "HETKIT_TEST_MORE" not in os.environ
    assert os.getcwd() == str(tmp_path)
    assert "/elsewhere" not in sys.path
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=Surroundings) == here


def test_a_removed_working_folder_stops_nothing(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    Surroundings.here().enter()
    monkeypatch.chdir(tmp_path)
    Surroundings(
        folder=b"/no/such", path=Surroundings.here().path, environ=Surroundings.here().environ
    ).enter()
    assert os.getcwd() == str(tmp_path)
