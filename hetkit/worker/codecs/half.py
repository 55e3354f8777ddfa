"""Half of the bytes: the bucket travels, and is summed, in a 16-bit float.

The relative rounding error of one cast is at most 2⁻¹¹ for fp16 (within 6e-5 … 65504) and 2⁻⁸ for
bf16 (over float32's whole range); a sum over n ranks rounds once more per addition.
"""

from collections.abc import Sequence

import torch

from hetkit.planning.codec_bytes import wire_bytes
from hetkit.worker.codecs.bucket import Bucket, Piece
from hetkit.worker.codecs.codec import Codec, Wire


class Half(Codec):
    """fp16 or bf16 on the wire.

    Args:
        name: The codec's name, ``"fp16"`` or ``"bf16"``.
        dtype: What travels.

    Example:
        >>> half = Half("bf16", torch.bfloat16)
        >>> half.wire_bytes([Piece("w", 0, (10, 100))], element_bytes=4, world_size=2)
        2000.0
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def exchange(self, bucket: Bucket, wire: Wire) -> None:
        """Casts, sums in 16 bits, casts back."""
        if bucket.flat.element_size() <= self._dtype.itemsize:
            wire.all_reduce(bucket.flat)
            return
        small = bucket.flat.to(self._dtype)
        wire.all_reduce(small)
        bucket.flat.copy_(small)

    def wire_bytes(self, pieces: Sequence[Piece], element_bytes: int, world_size: int) -> float:
        """2(n−1)/n of two bytes an element."""
        return wire_bytes(self.name, [p.shape for p in pieces], element_bytes, world_size)
