import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hetkit.records.history import Event
from hetkit.widgets.feed import ALONE_S, HEARTBEAT_S, PATIENCE_S, Feed

LIMIT_S = 20.0


@dataclass
class Cells:
    busy: bool = False
    idle_since: float = 0.0


@dataclass
class Wire:
    """Stands for the strip: keeps what was sent, and has a clock to turn."""

    now: float = 100.0
    frames: list[dict[str, Any]] = field(default_factory=list)

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.frames.append(content | {"bytes": len(buffers[0])})

    def clock(self) -> float:
        return self.now


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def cells() -> Cells:
    return Cells()


@pytest.fixture
def feed(session: Any, cells: Cells, wire: Wire) -> Any:
    made = Feed(session, cells, period_s=3600, clock=wire.clock)
    made.start(wire.send)
    yield made
    made.stop()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hetkit-feed"]


def test_a_tick_sends_only_what_is_new(session: Any, feed: Feed, wire: Wire) -> None:
    session.advance(5)
    feed.tick()
    session.advance(2)
    feed.tick()
    first, second = wire.frames
    assert dict(first["layout"])["loss"] == 5
    assert dict(second["layout"])["loss"] == 2
    assert second["base"] == 5
    assert second["bytes"] == 8 * sum(count for _, count in second["layout"])


def test_without_news_nothing_is_sent(session: Any, feed: Feed, wire: Wire) -> None:
    session.advance(5)
    feed.tick()
    wire.now += 60
    feed.tick()
    assert len(wire.frames) == 1


def test_at_work_a_heartbeat_is_sent_without_news(session: Any, feed: Feed, wire: Wire) -> None:
    session.state = "running"
    feed.tick()
    feed.tick()
    assert len(wire.frames) == 1
    wire.now += HEARTBEAT_S
    feed.tick()
    assert len(wire.frames) == 2


def test_messages_are_numbered_without_a_gap(session: Any, feed: Feed, wire: Wire) -> None:
    for _ in range(5):
        session.advance()
        feed.tick()
    assert [frame["number"] for frame in wire.frames] == [1, 2, 3, 4, 5]
    assert feed.snapshot()["number"] == 5


def test_two_threads_send_in_the_order_of_the_numbers(session: Any, feed: Feed, wire: Wire) -> None:
    def talk(name: str) -> None:
        for turn in range(30):
            feed.say(f"{name} {turn}")

    threads = [threading.Thread(target=talk, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT_S)
    numbers = [frame["number"] for frame in wire.frames]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers) >= 30


def test_a_snapshot_holds_everything_bounded(session: Any, feed: Feed) -> None:
    session.advance(2500)
    frame = feed.snapshot()
    assert frame["kind"] == "snapshot"
    assert [device["label"] for device in frame["fleet"]] == ["A100 #0", "V100 #1", "3090 #2"]
    assert all(0 < count <= 2000 for _, count in frame["layout"])
    assert len(frame["data"]) < 200_000


def test_a_long_silence_is_thinned_in_one_message(session: Any, feed: Feed, wire: Wire) -> None:
    feed.tick()
    session.advance(1000)
    feed.tick()
    assert all(count <= 64 for _, count in wire.frames[-1]["layout"])


def test_with_no_viewer_the_feed_slows_down_and_an_answer_wakes_it(
    session: Any, feed: Feed, wire: Wire
) -> None:
    session.advance()
    feed.tick()
    wire.now += PATIENCE_S
    assert not feed.watched(wire.now)
    session.advance()
    feed.tick()
    assert len(wire.frames) == 2  # the last message was long ago
    for _ in range(9):
        wire.now += 0.5
        session.advance()
        feed.tick()
    assert len(wire.frames) == 2
    wire.now += ALONE_S
    feed.tick()
    assert len(wire.frames) == 3
    feed.receive({"kind": "ack"})
    session.advance()
    feed.tick()
    assert len(wire.frames) == 4


def test_the_time_of_a_running_cell_does_not_count_as_absence(
    session: Any, feed: Feed, wire: Wire, cells: Cells
) -> None:
    session.advance()
    feed.tick()
    cells.busy = True
    wire.now += 1000
    assert feed.watched(wire.now)
    cells.busy, cells.idle_since = False, wire.now
    assert feed.watched(wire.now + PATIENCE_S / 2)
    assert not feed.watched(wire.now + PATIENCE_S)


def test_asking_for_the_state_counts_as_looking(session: Any, feed: Feed, wire: Wire) -> None:
    session.advance()
    feed.tick()
    wire.now += PATIENCE_S
    feed.snapshot()
    assert feed.watched(wire.now)


def test_a_viewer_that_missed_something_gets_a_snapshot(
    session: Any, feed: Feed, wire: Wire
) -> None:
    session.advance(3)
    feed.tick()
    feed.receive({"kind": "resync"})
    assert [frame["kind"] for frame in wire.frames] == ["delta", "snapshot"]
    assert wire.frames[1]["number"] == 2


def test_after_a_recovery_the_strip_starts_anew(session: Any, feed: Feed, wire: Wire) -> None:
    session.advance(6)
    feed.tick()
    redone = session.history.records_since(3)[0]
    session.history.append(redone)
    feed.tick()
    assert wire.frames[-1]["kind"] == "snapshot"
    assert dict(wire.frames[-1]["layout"])["loss"] == 5
    recovery = Event(step=4, epoch=0, time_s=1.0, kind="recovery", text="rank 1 is back")
    session.history.add_event(recovery)
    feed.tick()
    assert wire.frames[-1]["kind"] == "snapshot"


def test_each_event_is_sent_once(session: Any, feed: Feed, wire: Wire) -> None:
    for step in range(3):
        session.history.add_event(
            Event(step=step, epoch=0, time_s=0.0, kind="plan", text="same text")
        )
        feed.tick()
    assert [[e["step"] for e in frame["events"]] for frame in wire.frames] == [[0], [1], [2]]


def test_a_bad_tick_is_logged_and_shown_and_the_next_one_works(
    session: Any, cells: Cells, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[Exception] = [RuntimeError("no such control")]

    def refresh() -> None:
        if faults:
            raise faults.pop()

    feed = Feed(session, cells, on_tick=refresh, period_s=3600, clock=wire.clock)
    feed.start(wire.send)
    with caplog.at_level(logging.ERROR):
        assert feed.tick()
    assert "no such control" in caplog.text
    assert feed.tick()
    assert "no such control" in wire.frames[-1]["head"]["status"]
    feed.stop()


def test_the_thread_sends_by_itself_and_ends_with_the_session(
    session: Any, cells: Cells, wire: Wire
) -> None:
    feed = Feed(session, cells, period_s=0.01)
    feed.start(wire.send)
    session.advance(2)
    until(lambda: bool(wire.frames))
    session.state = "closed"
    until(lambda: not feed_threads())
    assert wire.frames[-1]["head"]["state"] == "closed"


def test_the_thread_ends_when_the_feed_is_collected(session: Any, cells: Cells, wire: Wire) -> None:
    feed = Feed(session, cells, period_s=0.01)
    feed.start(wire.send)
    alive = weakref.ref(feed)
    del feed

    def gone() -> bool:
        gc.collect()
        return alive() is None and not feed_threads()

    until(gone)
