"""The gradient as it is: one all-reduce of the bucket."""

from collections.abc import Sequence

from hetkit.compression import Uncompressed
from hetkit.planning.codec_bytes import wire_bytes
from hetkit.worker.codecs.bucket import Bucket, Piece
from hetkit.worker.codecs.codec import Codec, Wire


class Plain(Codec):
    """No compression.

    Example:
        >>> Plain().wire_bytes([Piece("w", 0, (10, 100))], element_bytes=4, world_size=2)
        4000.0
    """

    name = "none"
    as_it_is = True

    def exchange(self, bucket: Bucket, wire: Wire) -> None:
        """Sums the bucket itself."""
        wire.all_reduce(bucket.flat)

    def wire_bytes(self, pieces: Sequence[Piece], element_bytes: int, world_size: int) -> float:
        """2(n−1)/n of the bucket: a ring all-reduce."""
        return wire_bytes(Uncompressed(), [p.shape for p in pieces], element_bytes, world_size)
