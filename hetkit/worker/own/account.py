"""The account of one step of an own loop: what it computed, and what its losses were."""

import time
from dataclasses import replace

import torch

from hetkit.planning.time_split import Stamps
from hetkit.worker.own.gradients import SAMPLES


class Account:
    """Keeps a step's computing time apart from the exchanges in between, and sums its losses.

    Args:
        share: The rank's samples in the step.

    Attributes:
        pieces: Into how many pieces the rank's samples were cut; 0 without samples.
        largest_piece: Samples in the largest of them.

    Example:
        >>> account = Account(share=8)
        >>> account.add(torch.tensor(2.0), 8, of="samples", piece=8)
        >>> account.add(torch.tensor(0.5), 8, of="samples", piece=8)
        >>> account.loss()
        (20.0, 8.0)
    """

    def __init__(self, share: int) -> None:
        self.pieces = min(1, share)
        self.largest_piece = 0
        self._share = share
        self._sums: dict[str, torch.Tensor | float] = {}
        self._counts: dict[str, float] = {}
        self._compute_s = 0.0
        self._since: float | None = None

    def resume(self) -> None:
        """The rank computes from now on."""
        self._since = time.monotonic()

    def interrupt(self) -> None:
        """The rank has stopped computing."""
        if self._since is not None:
            self._compute_s += time.monotonic() - self._since
            self._since = None

    def add(self, mean: torch.Tensor, count: float, *, of: str, piece: int) -> None:
        """Takes a backward pass; the sum stays on its device, so that nothing waits for it."""
        self.largest_piece = max(self.largest_piece, piece)
        self._sums[of] = self._sums.get(of, 0.0) + mean.double() * count
        self._counts[of] = self._counts.get(of, 0.0) + count

    def loss(self) -> tuple[float, float]:
        """Returns the rank's loss as ``(sum, count)``: means over samples add up, pass by pass.

        A loss that is one mean over something else keeps its own count, so that the mean over
        the ranks is exact; beside others it enters with the rank's own mean.
        """
        if SAMPLES not in self._sums and len(self._sums) == 1:
            (name,) = self._sums
            return float(self._sums[name]), self._counts[name]
        total = float(self._sums.get(SAMPLES, 0.0))
        for name, count in self._counts.items():
            if name != SAMPLES and count:
                total += float(self._sums[name]) / count * self._share
        return total, float(self._share) if self._sums else 0.0

    def stamped(self, stamps: Stamps) -> Stamps:
        """Returns the stamps with the computing time in them; all exchanges are exposed."""
        self.interrupt()
        compute_s = max(0.0, self._compute_s - stamps.data_s)
        return replace(stamps, cut=stamps.start, compute_s=compute_s)
