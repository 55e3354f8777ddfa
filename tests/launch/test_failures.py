import time

import pytest

from hetkit.errors import LossError, RemoteError
from hetkit.launch.ends import Peer
from hetkit.launch.failures import COLLECT_S, Failures, first_cause, how_it_ended, revive
from hetkit.launch.messages import Failed
from hetkit.launch.orders import Exited
from hetkit.launch.payload import dump_bytes


def failed(rank, at, *, victim=False, error=None, step=3):
    error = error or ValueError(f"of rank {rank}")
    return Failed(
        rank=rank,
        generation=1,
        step=step,
        at=at,
        type_name=type(error).__name__,
        text=str(error),
        traceback=f"Traceback of rank {rank}\n",
        pickled=dump_bytes(error),
        victim=victim,
    )


def exited(rank, **how):
    return Exited(session="s", peer=Peer(1, rank), pid=100 + rank, **how)


def test_a_victim_that_speaks_first_is_not_the_cause():
    reports = [failed(0, 1.0, victim=True), failed(1, 2.0), failed(2, 3.0)]
    assert first_cause(reports).rank == 1
    assert first_cause(reports[:1]) is None
    assert first_cause([]) is None


def test_a_judgement_is_due_a_moment_after_the_first_failure_only():
    failures = Failures()
    assert not failures.due()
    failures.report(failed(0, 1.0, victim=True))
    assert not failures.due()
    failures.end(exited(1, signal=9))
    time.sleep(COLLECT_S)
    assert failures.due()
    failures.settle()
    assert not failures.due()
    failures.end(exited(2, signal=9))
    time.sleep(COLLECT_S)
    assert failures.due()


def test_who_reported_did_not_die_without_a_word():
    failures = Failures()
    failures.report(failed(0, 1.0, victim=True))
    failures.end(exited(0, exitcode=1))
    failures.end(exited(1, signal=11))
    assert failures.cause() is None
    assert list(failures.dead()) == [1]
    assert failures.describe(["A", "B"]) == ("rank 1 (B) died: SIGSEGV (a fault in native code)")


def test_ranks_that_only_lost_each_other_are_told_so():
    failures = Failures()
    failures.report(failed(0, 1.0, victim=True))
    assert failures.describe(["A", "B"]) == "the ranks lost each other"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"exitcode": 0}, "exit code 0"),
        ({"exitcode": 3}, "exit code 3"),
        ({"signal": 9}, "SIGKILL (killed by somebody, or out of memory)"),
        ({"signal": 15}, "SIGTERM"),
        ({"signal": 40}, "signal 40"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(how, words):
    assert how_it_ended(exited(0, **how)) == words


def test_an_exception_comes_back_as_itself_with_where_it_was_raised():
    error = revive(failed(1, 1.0), "V100 #1")
    assert type(error) is ValueError
    assert error.args == ("of rank 1",)
    notes = "\n".join(error.__notes__)
    assert "on rank 1 (V100 #1), step 3. In the worker:" in notes
    assert "Traceback of rank 1" in notes


def test_an_exception_of_the_build_has_no_step():
    assert "while it was built" in revive(failed(0, 1.0, step=-1), "A").__notes__[0]


def test_ours_says_that_it_is_ours():
    assert "(raised by hetkit)" in revive(failed(0, 1.0, error=LossError("x")), "A").__notes__[0]


class UntellableError(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize("pickled", [b"", b"no pickle", dump_bytes(3), dump_bytes(SystemExit(1))])
def test_what_cannot_come_back_is_told_in_words(pickled):
    report = Failed(
        rank=0,
        generation=1,
        step=0,
        at=0.0,
        type_name="Strange",
        text="went wrong",
        traceback="",
        pickled=pickled,
    )
    error = revive(report, "A")
    assert type(error) is RemoteError
    assert str(error) == "Strange: went wrong"


def test_an_exception_that_cannot_tell_its_text_is_told_for_it():
    report = Failed(
        rank=0,
        generation=1,
        step=0,
        at=0.0,
        type_name="UntellableError",
        text="(its text cannot be had)",
        traceback="",
        pickled=dump_bytes(UntellableError()),
    )
    assert type(revive(report, "A")) is RemoteError
