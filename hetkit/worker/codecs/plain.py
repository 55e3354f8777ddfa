"""The gradient as it is: one all-reduce of the bucket."""

import torch

from hetkit.planning.exchange_time import ring_bytes
from hetkit.worker.codecs.codec import Wire


class Plain:
    """No compression.

    Example:
        >>> Plain().wire_bytes(elements=1000, element_bytes=4, world_size=2)
        4000.0
    """

    name = "none"
    as_it_is = True

    def exchange(self, bucket: torch.Tensor, wire: Wire) -> None:
        """Sums the bucket itself."""
        wire.all_reduce(bucket)

    def wire_bytes(self, elements: int, element_bytes: int, world_size: int) -> float:
        """2(n−1)/n of the bucket: a ring all-reduce."""
        return ring_bytes(world_size, elements * element_bytes)
