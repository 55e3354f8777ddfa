"""From what the workers' ends look like to the exception that the notebook sees."""

import signal
import time
from collections.abc import Iterable, Sequence

from hetkit.errors import HetkitError, RemoteError
from hetkit.launch.messages import Failed
from hetkit.launch.orders import Exited
from hetkit.launch.payload import load_bytes

COLLECT_S = 0.3
"""How long reports are collected after the first failure: the victim often speaks first."""


class Failures:
    """What went wrong in one generation of workers, collected until a judgement is due.

    ::

        rank 1 "connection closed by peer"      ┐
        rank 0 ValueError: …                    ├ COLLECT_S ─▶ rank 0's ValueError is the cause
        rank 1 exit code 1                      ┘

    Example:
        >>> failures = Failures()
        >>> failures.due()
        False
    """

    def __init__(self) -> None:
        self._reports: dict[int, Failed] = {}
        self._ends: dict[int, str] = {}
        self._judge_at: float | None = None

    def report(self, failed: Failed) -> None:
        """Takes a worker's own account."""
        self._reports[failed.rank] = failed
        self._wait()

    def end(self, exited: Exited) -> None:
        """Takes the end of a worker's process."""
        self._ends[exited.peer.rank] = how_it_ended(exited)
        self._wait()

    def due(self) -> bool:
        """Returns whether something went wrong long enough ago to judge it."""
        return self._judge_at is not None and time.monotonic() >= self._judge_at

    def settle(self) -> None:
        """The judgement was made; another one takes another failure."""
        self._judge_at = None

    def cause(self) -> Failed | None:
        """Returns the failure of the user's code or of ours that came first, if there is one."""
        return first_cause(self._reports.values())

    def dead(self) -> dict[int, str]:
        """Returns the ranks that ended without a word, and how."""
        return {rank: how for rank, how in self._ends.items() if rank not in self._reports}

    def describe(self, labels: Sequence[str]) -> str:
        """Returns who died of what, for a person to read."""
        deaths = (
            f"rank {rank} ({labels[rank]}) died: {how}" for rank, how in sorted(self.dead().items())
        )
        return "; ".join(deaths) or "the ranks lost each other"

    def _wait(self) -> None:
        if self._judge_at is None:
            self._judge_at = time.monotonic() + COLLECT_S


def how_it_ended(exited: Exited) -> str:
    """Returns the end of a process in words.

    Example:
        >>> from hetkit.launch.ends import Peer
        >>> how_it_ended(Exited(session="s", peer=Peer(1, 0), pid=7, signal=9))
        'SIGKILL (killed by somebody, or out of memory)'
    """
    if not exited.signal:
        return f"exit code {exited.exitcode}"
    try:
        name = signal.Signals(exited.signal).name
    except ValueError:  # a real-time signal
        name = f"signal {exited.signal}"
    return name + _MEANINGS.get(name, "")


_MEANINGS = {
    "SIGKILL": " (killed by somebody, or out of memory)",
    "SIGSEGV": " (a fault in native code)",
    "SIGABRT": " (native code gave up)",
}


def first_cause(failures: Iterable[Failed]) -> Failed | None:
    """Returns the failure that came first by itself; None when all are victims of another.

    The victim of a failed peer often reports first ("connection closed by peer"), so victims never
    count as the cause.
    """
    causes = [failed for failed in failures if not failed.victim]
    return min(causes, key=lambda failed: failed.at, default=None)


def revive(failed: Failed, label: str) -> Exception:
    """Returns the worker's exception as itself, with a note of where it was raised.

    An exception whose type cannot be brought back here, one that cannot tell its text, or one that
    would end the kernel (``SystemExit``), becomes a `RemoteError` with its text.

    Args:
        failed: The worker's account.
        label: The device's name for people.
    """
    error: object = None
    if failed.pickled:
        try:
            error = load_bytes(failed.pickled)
            str(error)
        except Exception:  # noqa: BLE001 - its own code decides what unpickling raises
            error = None
    if not isinstance(error, Exception):
        error = RemoteError(f"{failed.type_name}: {failed.text}")
    where = f"step {failed.step}" if failed.step >= 0 else "while it was built"
    kind = " (raised by hetkit)" if isinstance(error, HetkitError) else ""
    error.add_note(f"on rank {failed.rank} ({label}), {where}{kind}. In the worker:\n")
    error.add_note(failed.traceback.rstrip())
    return error
