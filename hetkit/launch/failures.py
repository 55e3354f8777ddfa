"""From a worker's account of its failure to the exception that the notebook sees."""

from collections.abc import Iterable

from hetkit.errors import HetkitError, RemoteError
from hetkit.launch.messages import Failed
from hetkit.launch.payload import load_bytes


def first_cause(failures: Iterable[Failed]) -> Failed | None:
    """Returns the failure that came first by itself; None when all are victims of another.

    The victim of a failed peer often reports first ("connection closed by peer"), so victims never
    count as the cause.
    """
    causes = [failed for failed in failures if not failed.victim]
    return min(causes, key=lambda failed: failed.at, default=None)


def revive(failed: Failed, label: str) -> Exception:
    """Returns the worker's exception as itself, with a note of where it was raised.

    An exception whose type cannot be brought back here, or one that would end the kernel
    (``SystemExit``), becomes a `RemoteError` with its text.

    Args:
        failed: The worker's account.
        label: The device's name for people.
    """
    error: object = None
    if failed.pickled:
        try:
            error = load_bytes(failed.pickled)
        except Exception:  # noqa: BLE001 - its own code decides what unpickling raises
            error = None
    if not isinstance(error, Exception):
        error = RemoteError(f"{failed.type_name}: {failed.text}")
    where = f"step {failed.step}" if failed.step >= 0 else "while it was built"
    kind = " (raised by hetkit)" if isinstance(error, HetkitError) else ""
    error.add_note(f"on rank {failed.rank} ({label}), {where}{kind}. In the worker:\n")
    error.add_note(failed.traceback.rstrip())
    return error
