"""Half of the bytes: the bucket travels, and is summed, in a 16-bit float.

The relative rounding error of one cast is at most 2⁻¹¹ for fp16 (within 6e-5 … 65504) and 2⁻⁸ for
bf16 (over float32's whole range); a sum over n ranks rounds once more per addition.
"""

import torch

from hetkit.planning.exchange_time import ring_bytes
from hetkit.worker.codecs.codec import Wire


class Half:
    """fp16 or bf16 on the wire.

    Args:
        name: The codec's name, ``"fp16"`` or ``"bf16"``.
        dtype: What travels.

    Example:
        >>> Half("bf16", torch.bfloat16).wire_bytes(elements=1000, element_bytes=4, world_size=2)
        2000.0
    """

    as_it_is = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def exchange(self, bucket: torch.Tensor, wire: Wire) -> None:
        """Casts, sums in 16 bits, casts back. A complex bucket travels as pairs of reals."""
        reals = torch.view_as_real(bucket) if bucket.is_complex() else bucket
        if reals.element_size() <= self._dtype.itemsize:
            wire.all_reduce(reals)
            return
        small = reals.to(self._dtype)
        wire.all_reduce(small)
        reals.copy_(small)

    def wire_bytes(self, elements: int, element_bytes: int, world_size: int) -> float:
        """2(n−1)/n of two bytes an element."""
        return ring_bytes(world_size, elements * min(element_bytes, self._dtype.itemsize))
