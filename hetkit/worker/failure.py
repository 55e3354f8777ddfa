"""An exception on its way out of a rank: as a message, whatever the exception is made of."""

import time
import traceback

from hetkit.errors import HetkitError
from hetkit.launch import messages as m
from hetkit.launch.payload import dump_bytes


def describe(
    error: BaseException, rank: int, generation: int, step: int, *, victim: bool
) -> m.Failed:
    """Returns the message that tells the coordinator of ``error``.

    Args:
        error: What was raised.
        rank: By this rank.
        generation: Of this start of the workers.
        step: In this step; -1 before the first.
        victim: Whether another rank is to blame.

    Example:
        >>> failed = describe(ZeroDivisionError("by 0"), 1, 1, 7, victim=False)
        >>> failed.type_name, failed.text, failed.step
        ('ZeroDivisionError', 'by 0', 7)
    """
    return m.Failed(
        rank=rank,
        generation=generation,
        step=step,
        at=time.monotonic(),
        type_name=type(error).__name__,
        text=_words(error),
        traceback=_sendable("".join(traceback.format_exception(error))),
        pickled=pickled(error),
        victim=victim,
    )


def pickled(error: BaseException) -> bytes:
    """Returns the exception itself as bytes; none where it cannot be pickled."""
    try:
        return dump_bytes(error)
    except HetkitError:
        return b""


def _words(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception as broken:  # noqa: BLE001 - the user's own __str__ decides what it raises
        return f"(its text cannot be had: {type(broken).__name__})"


def _sendable(text: str) -> str:
    # A subclass of str (torch has one for KeyErrors) and a lone surrogate have no wire form.
    return text.encode(errors="backslashreplace").decode()
