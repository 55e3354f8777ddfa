"""What the workers have written, per rank and within bounds, for whoever wants to look."""

import threading
from collections import deque
from dataclasses import dataclass, field

from hetkit.launch.ends import Peer


@dataclass
class _Tail:
    pieces: deque[str] = field(default_factory=deque)
    size_chars: int = 0


class OutputLog:
    r"""The last output of each rank; may be used from any thread.

    Args:
        capacity_chars: How much to keep for each rank.

    Example:
        >>> from hetkit.launch.channel import Peer
        >>> from hetkit.launch.output import OutputLog
        >>> log = OutputLog(capacity_chars=1000)
        >>> log.add(Peer(1, 0), "stdout", "one\ntwo\nthree\n")
        >>> log.tail(rank=0, lines=2)
        'two\nthree'
    """

    def __init__(self, capacity_chars: int = 100_000) -> None:
        self._capacity_chars = capacity_chars
        self._tails: dict[int, _Tail] = {}
        self._lock = threading.Lock()

    def add(self, peer: Peer, stream: str, text: str) -> None:
        """Appends what a rank wrote; both streams are kept in the order of their arrival."""
        with self._lock:
            tail = self._tails.setdefault(peer.rank, _Tail())
            tail.pieces.append(text[-self._capacity_chars :])
            tail.size_chars += len(tail.pieces[-1])
            while tail.size_chars > self._capacity_chars:
                tail.size_chars -= len(tail.pieces.popleft())

    def tail(self, rank: int, lines: int = 50) -> str:
        """Returns the last lines of a rank's output, "" if it wrote nothing."""
        with self._lock:
            tail = self._tails.get(rank)
            text = "".join(tail.pieces) if tail else ""
        return "\n".join(text.splitlines()[-lines:]) if lines > 0 else ""
