"""The guard: looks now and then whether the compressed gradient points where the true one does.

Every so many exchanges the gradient also travels as it is, beside the codec's own exchange, and the
two sums are compared, over all buckets of the step::

    cosine = ⟨c, g⟩ / (‖c‖ ‖g‖)          error = ‖c − g‖ / ‖g‖

with g the true sum and c what the codec made of it. Both are blind to the optimizer and to the
learning rate. A codec without error feedback loses for good what it leaves out: of a cosine of 0.9,
1 − 0.9² = 19 % of the gradient's square. With error feedback c also holds what waited from earlier
steps, so c and g differ by design; a step that is nearly orthogonal to the gradient tells that what
waits is old.
"""

import math

import torch

LOWEST_COSINE = 0.9
"""Below it, a codec without error feedback is reported."""

LOWEST_COSINE_FED_BACK = 0.2
"""Below it, a codec with error feedback is reported."""


class Guard:
    """Decides when to look, and compares.

    Attributes:
        every: Steps between two looks; 0 for none.

    Example:
        >>> guard = Guard()
        >>> guard.every = 100
        >>> guard.begin_step(7)
        >>> guard.looks
        True
        >>> guard.compare(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
        >>> [round(each, 3) for each in guard.reading()]
        [0.707, 0.707]
    """

    def __init__(self) -> None:
        self.every = 0
        self._since: int | None = None
        self._step = 0
        self._sums = [0.0] * 4

    def restart(self) -> None:
        """Another codec is in force: the next exchange is looked at."""
        self._since = None

    def begin_step(self, step: int) -> None:
        """Begins a step; all ranks count the same steps, so all look at the same ones."""
        self._step = step
        self._sums = [0.0] * 4

    @property
    def looks(self) -> bool:
        """Whether the step's exchange is looked at."""
        if not self.every:
            return False
        return self._since is None or self._step - self._since >= self.every

    def compare(self, compressed: torch.Tensor, true: torch.Tensor) -> None:
        """Adds a bucket: what the codec made of the sum over the ranks, and that sum.

        Args:
            compressed: The codec's result, one-dimensional.
            true: The uncompressed sum, of the same shape.
        """
        wide = torch.promote_types(true.dtype, torch.float32)
        made, meant = compressed.to(wide), true.to(wide)
        off = made - meant
        pairs = ((made, meant), (made, made), (meant, meant), (off, off))
        for place, (left, right) in enumerate(pairs):
            self._sums[place] += float(torch.dot(left, right))

    def reading(self) -> tuple[float, float] | None:
        """Returns ``(cosine, error)`` of the step; None where there was no look, or no number.

        A gradient of zeros has no direction, and one that is not finite is skipped by all ranks.
        """
        dot, made, meant, off = self._sums
        if not (0 < made < math.inf and 0 < meant < math.inf):
            return None
        # The product of two small squares can vanish; that of their roots does not.
        return dot / (math.sqrt(made) * math.sqrt(meant)), math.sqrt(off / meant)

    def settle(self) -> tuple[float, float] | None:
        """Ends the step; returns its `reading`."""
        found = self.reading()
        if found is not None:
            self._since = self._step
        return found
