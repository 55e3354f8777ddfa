from concurrent.futures import Future
from pathlib import Path

import pytest

from hetkit.errors import RemoteError, WorkerDied
from hetkit.launch.calls import Calls
from hetkit.launch.messages import Answer, Saved
from hetkit.launch.payload import dump_bytes


def answer(number, rank, value, *, ok=True):
    return Answer(call_id=number, rank=rank, ok=ok, pickled=dump_bytes(value))


def opened(ranks):
    calls, future = Calls(), Future()
    return calls, future, calls.open(ranks, future)


def test_answers_are_put_in_the_order_that_was_asked_for():
    calls, future, number = opened((2, 0))
    calls.answered(answer(number, 0, "zero"))
    assert not future.done()
    calls.answered(answer(number, 2, "two"))
    assert future.result(timeout=0) == ["two", "zero"]


def test_the_first_failure_settles_the_call_and_the_rest_is_ignored():
    calls, future, number = opened((0, 1))
    calls.answered(answer(number, 1, KeyError("x"), ok=False))
    calls.answered(answer(number, 0, "late"))
    with pytest.raises(KeyError) as caught:
        future.result(timeout=0)
    assert caught.value.__notes__ == ["in a call on rank 1"]


def test_a_failure_without_an_exception_is_told_all_the_same():
    calls, future, number = opened((0,))
    calls.answered(Answer(call_id=number, rank=0, ok=False, pickled=b""))
    with pytest.raises(RemoteError):
        future.result(timeout=0)


def test_an_answer_that_cannot_be_opened_is_a_failure():
    calls, future, number = opened((0,))
    calls.answered(Answer(call_id=number, rank=0, ok=True, pickled=b"no pickle"))
    with pytest.raises(Exception, match=r".") as caught:
        future.result(timeout=0)
    assert caught.value.__notes__ == ["in a call on rank 0"]


def test_none_is_an_answer():
    calls, future, number = opened((0,))
    calls.answered(answer(number, 0, None))
    assert future.result(timeout=0) == [None]


def test_a_saved_state_is_a_path_and_unknown_numbers_are_ignored():
    calls, future, number = opened((0,))
    calls.saved(Saved(path="/x/y.ckpt", call_id=number + 1, step=3))
    calls.answered(answer(number + 1, 0, "stray"))
    assert not future.done()
    calls.saved(Saved(path="/x/y.ckpt", call_id=number, step=3))
    assert future.result(timeout=0) == Path("/x/y.ckpt")


def test_all_open_calls_fail_with_their_workers():
    calls, future, _ = opened((0, 1))
    other = Future()
    calls.open((0,), other)
    calls.fail_all(WorkerDied("gone"))
    for each in (future, other):
        with pytest.raises(WorkerDied, match="gone"):
            each.result(timeout=0)
    calls.fail_all(WorkerDied("again"))
