"""A step's sums on one rank, and the denominator that all ranks agree on."""

import torch
import torch.distributed as dist


class Totals:
    """What a step's passes add up to.

    Args:
        device: Where the ranks exchange tensors.

    Attributes:
        count: The denominator so far, of this rank alone.
        passes: Forward and backward passes over samples that were made.
        largest: Samples of the largest of them.
        shrunk: Whether one ran out of memory and was made again in smaller ones.

    Example:
        >>> totals = Totals(torch.device("cpu"))
        >>> totals.add(torch.tensor(2.0), 3.0)
        >>> totals.loss_sum(), totals.agreed_count()
        (6.0, 3.0)
    """

    def __init__(self, device: torch.device) -> None:
        self.count = 0.0
        self.passes = self.largest = 0
        self.shrunk = False
        self._parts: list[tuple[torch.Tensor, float]] = []
        self._device = device
        self._shared: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, mean: torch.Tensor, count: float) -> None:
        """Adds a micro-batch; its mean stays on its device, so that nothing waits for it."""
        self._parts.append((mean, count))
        self.count += count

    def made(self, size: int) -> None:
        """Counts a pass over ``size`` samples; one over none, which only takes part, does not."""
        self.passes += size > 0
        self.largest = max(self.largest, size)

    def loss_sum(self) -> float:
        """Returns the sum of the losses; call it when the step is over."""
        return sum(float(mean) * count for mean, count in self._parts)

    def agree(self) -> None:
        """Starts summing the counts over the ranks, beside the last backward; once a step."""
        if self._work is None:
            self._shared = torch.tensor([self.count], dtype=torch.float64, device=self._device)
            self._work = dist.all_reduce(self._shared, async_op=True)

    def agreed_count(self) -> float:
        """Returns the step's denominator over all ranks."""
        if self._work is None or self._shared is None:
            return self.count
        self._work.wait()
        return float(self._shared.item())
