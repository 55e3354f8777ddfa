"""Takes a worker's output in, whatever it writes, and passes on what a person can read.

A worker must never wedge on a full pipe, a flood must not reach the notebook, and the last words
of a dying worker must. So everything is read at once into a tail of bounded length, and the tail
is passed on whenever the rank's allowance permits; what did not fit is counted and named.
"""

import codecs
import os

READ_BYTES = 64 << 10
HELD_BYTES = 64 << 10
RATE_BYTES_PER_S = 256 << 10
_PAUSE_S = 0.05  # lines printed one by one become one event, not thousands
_LAST_READS = 32


class Allowance:
    """How much a rank may still write: a token bucket that may run into debt once.

    Args:
        rate_bytes_per_s: How fast it fills; it holds one second's worth at most.

    Example:
        >>> from hetkit.worker.drain import Allowance
        >>> allowance = Allowance(rate_bytes_per_s=100)
        >>> allowance.spend(150, now_s=0.0)
        >>> allowance.permits(now_s=0.4), allowance.permits(now_s=0.6)
        (False, True)
    """

    def __init__(self, rate_bytes_per_s: float = RATE_BYTES_PER_S) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._left_bytes = rate_bytes_per_s
        self._at_s: float | None = None

    def permits(self, now_s: float) -> bool:
        """Returns whether anything may be passed on now."""
        if self._at_s is not None:
            gained = (now_s - self._at_s) * self._rate_bytes_per_s
            self._left_bytes = min(self._rate_bytes_per_s, self._left_bytes + gained)
        self._at_s = now_s
        return self._left_bytes > 0

    def spend(self, size_bytes: int, now_s: float) -> None:
        """Takes note of what was passed on."""
        self.permits(now_s)
        self._left_bytes -= size_bytes


class Drain:
    """One output pipe of one worker.

    Args:
        fd: The pipe's reading end; this object closes it.
        stream: ``"stdout"`` or ``"stderr"``.
        allowance: The rank's, shared by its two streams.
    """

    def __init__(self, fd: int, stream: str, allowance: Allowance) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._closed = False
        self.stream = stream
        self._allowance = allowance
        self._held = bytearray()
        self._dropped_bytes = 0
        self._next_s = 0.0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def holds(self) -> bool:
        """Whether something waits to be passed on."""
        return bool(self._held)

    def read(self) -> int | None:
        """Takes in one chunk; returns its size, 0 at the pipe's end, None when nothing is there."""
        if self._closed:
            return None
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return None
        self._held += data
        excess = len(self._held) - HELD_BYTES
        if excess > 0:
            del self._held[:excess]
            self._dropped_bytes += excess
        return len(data)

    def pass_on(self, now_s: float) -> str:
        """Returns what may be shown now, which may be nothing."""
        if not self._held or now_s < self._next_s or not self._allowance.permits(now_s):
            return ""
        self._next_s = now_s + _PAUSE_S
        self._allowance.spend(len(self._held), now_s)
        return self._text(final=False)

    def finish(self) -> str:
        """Returns all that is left, after the worker's end, and closes the pipe.

        The number of reads is bounded: a stray descendant may still hold the pipe and write.
        """
        for _ in range(_LAST_READS):
            if not self.read():
                break
        self._closed = True
        os.close(self.fd)
        return self._text(final=True)

    def _text(self, *, final: bool) -> str:
        mark = ""
        if self._dropped_bytes:
            mark = f"\n[… {self._dropped_bytes} bytes dropped]\n"
            self._dropped_bytes = 0
            self._decoder.reset()
        text = mark + self._decoder.decode(bytes(self._held), final)
        self._held.clear()
        return text
