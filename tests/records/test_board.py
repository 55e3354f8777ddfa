import threading
import time

from hetkit.records.board import Board


def test_what_is_posted_stays_until_it_is_changed():
    board = Board()
    board.post(state="starting")
    board.post(settled=False)
    assert (board.status.state, board.status.settled) == ("starting", False)


def test_waiting_ends_with_the_change_or_with_the_time():
    board = Board()
    assert not board.wait(lambda status: status.state == "ready", timeout_s=0.01)
    poster = threading.Timer(0.05, lambda: board.post(state="ready"))
    poster.start()
    began = time.monotonic()
    assert board.wait(lambda status: status.state == "ready", timeout_s=30.0)
    assert time.monotonic() - began < 30.0
    poster.join(10.0)


def test_a_status_that_was_read_does_not_change_in_the_readers_hand():
    board = Board()
    before = board.status
    board.post(state="failed", error=ValueError("x"))
    assert (before.state, before.error) == ("new", None)
