"""Calls into the ranks at a grant boundary, and their answers as futures."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetkit.errors import RemoteError
from hetkit.launch.messages import Answer, Saved
from hetkit.launch.payload import load_bytes


@dataclass
class _Open:
    ranks: tuple[int, ...]
    future: Future[Any]
    answers: dict[int, Any] = field(default_factory=dict)


class Calls:
    """Open calls by number. Used by the coordinator's thread alone; the futures by anyone.

    Example:
        >>> calls = Calls()
        >>> future = Future()
        >>> number = calls.open((0,), future)
        >>> calls.saved(Saved(path="/tmp/x", call_id=number, step=3))
        >>> future.result(timeout=0)
        PosixPath('/tmp/x')
    """

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, _Open] = {}

    def open(self, ranks: tuple[int, ...], future: Future[Any]) -> int:
        """Notes a call to ``ranks``; returns its number."""
        self._number += 1
        self._open[self._number] = _Open(ranks=ranks, future=future)
        return self._number

    def answered(self, answer: Answer) -> None:
        """Takes one rank's answer; the last one, or the first exception, settles the future."""
        call = self._open.get(answer.call_id)
        if call is None:
            return
        value, ok = _opened(answer)
        if not ok:
            del self._open[answer.call_id]
            failure = value if isinstance(value, Exception) else RemoteError("the call failed")
            failure.add_note(f"in a call on rank {answer.rank}")
            call.future.set_exception(failure)
            return
        call.answers[answer.rank] = value
        if len(call.answers) == len(call.ranks):
            del self._open[answer.call_id]
            call.future.set_result([call.answers[rank] for rank in call.ranks])

    def saved(self, saved: Saved) -> None:
        """Takes rank 0's word that the state is on disk."""
        call = self._open.pop(saved.call_id, None)
        if call is not None:
            call.future.set_result(Path(saved.path))

    def fail_all(self, error: Exception) -> None:
        """Settles every open call with ``error``: its workers are gone."""
        for call in self._open.values():
            call.future.set_exception(error)
        self._open.clear()


def _opened(answer: Answer) -> tuple[Any, bool]:
    if not answer.pickled:
        return None, answer.ok
    try:
        return load_bytes(answer.pickled), answer.ok
    except Exception as error:  # noqa: BLE001 - its own code decides what unpickling raises
        return error, False
