"""What each gradient codec sends, exactly, from the shapes in a bucket alone."""

import math
from collections.abc import Sequence

from hetkit.compression import Bf16, Fp16, parse_compression
from hetkit.planning.exchange_time import ring_bytes

Shape = tuple[int, ...]


def wire_bytes(
    compression: str, shapes: Sequence[Shape], element_bytes: int, world_size: int
) -> float:
    """Returns the bytes that one rank sends for one bucket.

    Args:
        compression: A built-in codec's text, such as ``"topk(ratio=0.05)"``.
        shapes: Shapes of the parameters in the bucket; a complex one's last dimension twice.
        element_bytes: Size of one (real) element.
        world_size: Ranks, at least 1.

    Raises:
        SettingsError: The text names no codec.

    Example:
        >>> wire_bytes("fp16", [(10, 100)], element_bytes=4, world_size=2)
        2000.0
    """
    spec = parse_compression(compression)
    elements = sum(map(math.prod, shapes))
    size = min(2, element_bytes) if isinstance(spec, Fp16 | Bf16) else element_bytes
    return ring_bytes(world_size, elements * size)
