"""What each gradient codec sends, exactly, from the shapes in a bucket alone.

A ring all-reduce adds on its way, so what travels through it must be a number that can be added:
fp16, or PowerSGD's factors. Integers with scales and picked elements cannot be added on the way, so
they go in two halves of equal rows, a reduce-scatter and an all-gather by hand::

    rank i  ── row j: my part of shard j ──▶  rank j adds up shard j  ── its sum ──▶  every rank
               all-to-all, W − 1 rows sent                               all-gather, W − 1 rows

    bytes per rank = 2(W − 1) · row,   row ≈ codes of elements/W

so that they shrink by the same factor at any world size W. A shard is cut into *segments* of equal
length, which share a scale (int8, int4) or an address space of 16 bits (top-k); a row is ::

    │ elements that travel as they are │ scales, or a flag │ codes, or values │ indices │

each part filled up to 8 bytes, so that it can be read in place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetkit.compression import (
    COMPRESSIONS,
    Bf16,
    Compression,
    Custom,
    Fp16,
    Int4,
    Int8,
    PowerSGD,
    Selective,
    Threshold,
    TopK,
    parse_compression,
)
from hetkit.errors import SettingsError
from hetkit.planning.exchange_time import ring_bytes

Shape = tuple[int, ...]

ADDRESSES = 65_536
"""Elements that an index of 16 bits can tell apart."""


@dataclass(frozen=True)
class Segments:
    """How elements are cut: each rank's shard into ``count`` segments of ``length``.

    Args:
        count: Segments per rank.
        length: Elements per segment; the last ones may be filling.
    """

    count: int
    length: int


def segments(elements: int, world_size: int, most: int, multiple: int = 1) -> Segments:
    """Cuts elements into equal segments of at most ``most``, with the least filling.

    Args:
        elements: How many there are, at least 1.
        world_size: Ranks, at least 1.
        most: The longest segment, a multiple of ``multiple``.
        multiple: A segment's length is a multiple of this.

    Example:
        >>> segments(3000, world_size=2, most=1024)
        Segments(count=2, length=750)
    """
    shard = math.ceil(elements / world_size)
    count = math.ceil(shard / most)
    length = math.ceil(shard / count)
    return Segments(count, math.ceil(length / multiple) * multiple)


def picks(ratio: float, length: int) -> int:
    """Returns how many elements of a segment travel: ⌈ratio · length⌉, at least 1.

    Example:
        >>> picks(0.05, 1000)
        50
    """
    return max(1, min(length, math.ceil(ratio * length)))


def row_bytes(parts: Sequence[tuple[int, int]]) -> int:
    """Returns the size of a row of ``(count, bytes each)``, each part filled up to 8 bytes.

    Example:
        >>> row_bytes([(1, 4), (9, 1)])
        24
    """
    return sum(math.ceil(count * size / 8) * 8 for count, size in parts)


def matrix(shape: Shape) -> tuple[int, int]:
    """Returns a parameter's rows and columns as PowerSGD sees it.

    Example:
        >>> matrix((64, 3, 5, 5))
        (64, 75)
    """
    return shape[0], math.prod(shape[1:])


def is_compressed(spec: Selective, shape: Shape, element_bytes: int) -> bool:
    """Tells whether a parameter is compressed, or travels as it is in the same message.

    Biases and norms (one dimension) and small tensors are few bytes and much accuracy. PowerSGD's
    two factors must also be less than half of the matrix.

    Example:
        >>> is_compressed(Int8(), (512,), 4), is_compressed(Int8(), (512, 10), 4)
        (False, True)
    """
    elements = math.prod(shape)
    if elements == 0 or elements * element_bytes < spec.small_bytes:
        return False
    if isinstance(spec, PowerSGD):
        if len(shape) < 2:
            return False
        rows, columns = matrix(shape)
        return 2 * min(spec.rank, rows, columns) * (rows + columns) <= elements
    return len(shape) > 1 or spec.small_bytes == 0


def wire_bytes(
    compression: str | Compression,
    shapes: Sequence[Shape],
    element_bytes: int,
    world_size: int,
) -> float:
    """Returns the bytes that one rank sends for one bucket.

    Args:
        compression: A built-in codec, or its text, such as ``"topk(ratio=0.05)"``.
        shapes: Shapes of the parameters in the bucket; a complex one's last dimension twice.
        element_bytes: Size of one (real) element.
        world_size: Ranks, at least 1.

    Raises:
        SettingsError: The text names no codec, or one of a task's own: only that knows.

    Example:
        >>> wire_bytes("fp16", [(10, 100)], element_bytes=4, world_size=2)
        2000.0
        >>> wire_bytes("int8", [(1024, 1024)], element_bytes=4, world_size=4) / (1.5 * 4 * 1024**2)
        0.2509765625
    """
    spec = parse_compression(compression)
    if isinstance(spec, Custom):
        raise SettingsError(
            f"what {str(spec)!r} sends is known to that codec alone: ask its wire_bytes, or name "
            f"one of {', '.join(COMPRESSIONS)}."
        )
    sizes = list(map(math.prod, shapes))
    elements = sum(sizes)
    if not isinstance(spec, Selective):
        size = min(2, element_bytes) if isinstance(spec, Fp16 | Bf16) else element_bytes
        return ring_bytes(world_size, elements * size)
    chosen = [shape for shape in shapes if is_compressed(spec, shape, element_bytes)]
    compressed = sum(map(math.prod, chosen))
    if world_size == 1 or not compressed:
        return ring_bytes(world_size, elements * element_bytes)
    raw = elements - compressed
    if isinstance(spec, PowerSGD):
        sent = raw + 1 + sum(_factors(spec, shape) for shape in chosen)
        return ring_bytes(world_size, sent * max(4, element_bytes))
    parts = [(math.ceil(raw / world_size), element_bytes)]
    parts += code_parts(spec, compressed, element_bytes, world_size)
    return 2.0 * (world_size - 1) * row_bytes(parts)


def code_parts(
    spec: Selective, compressed: int, element_bytes: int, world_size: int
) -> list[tuple[int, int]]:
    """Returns count and size of what a row holds of the compressed elements, part by part."""
    cut = cut_for(spec, compressed, world_size)
    if isinstance(spec, TopK | Threshold):
        sent = cut.count * picks(spec.ratio, cut.length)
        return [(1, 4), (sent, min(4, element_bytes)), (sent, 2)]
    codes = cut.count * cut.length // (2 if isinstance(spec, Int4) else 1)
    return [(cut.count, 4), (codes, 1)]


def cut_for(spec: Selective, compressed: int, world_size: int) -> Segments:
    """Returns how a codec of two halves cuts its compressed elements."""
    if isinstance(spec, Int8 | Int4):
        even = 2 if isinstance(spec, Int4) else 1  # two codes share a byte
        return segments(compressed, world_size, spec.block - spec.block % even, even)
    return segments(compressed, world_size, ADDRESSES)


def _factors(spec: PowerSGD, shape: Shape) -> int:
    rows, columns = matrix(shape)
    return min(spec.rank, rows, columns) * (rows + columns)
