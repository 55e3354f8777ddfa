"""Agreement: whether all ranks read the same stream, told by its first sample.

A stream that shards itself by rank is the usual way for code written for plain DDP; here it would
train on a part of the data, without a word.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hetkit.errors import DataError


def fingerprint(sample: Any) -> int:
    """Returns a number that two equal samples share, whatever process made them.

    Args:
        sample: Tensors, arrays, numbers, text and bytes, nested as you like; of anything else only
            the type counts.

    Example:
        >>> fingerprint({"x": torch.ones(2), "y": 1}) == fingerprint({"x": torch.ones(2), "y": 1})
        True
        >>> fingerprint({"x": torch.ones(2), "y": 1}) == fingerprint({"x": torch.ones(2), "y": 2})
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for piece in _pieces(sample):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little") >> 1  # fits int64


def require_same(number: int, device: torch.device) -> None:
    """Makes sure that ``number``, a fingerprint, is the same on all ranks.

    Args:
        number: This rank's.
        device: Where the ranks exchange tensors.

    Raises:
        DataError: It is not; on all ranks.
    """
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = int(extremes[0].item()), -int(extremes[1].item())
    if largest != smallest:
        raise DataError(
            "the stream does not begin with the same sample on all ranks: every rank must read "
            "the same stream. Do not shard it by rank, and take what is random in it from the "
            "global random numbers, which are seeded alike."
        )


def _pieces(sample: Any) -> Iterator[bytes]:
    if isinstance(sample, torch.Tensor):
        plain = sample.detach().cpu().contiguous().reshape(-1)
        yield f"{sample.dtype} {tuple(sample.shape)}".encode()
        yield plain.view(torch.uint8).numpy().tobytes()
    elif isinstance(sample, np.ndarray):
        yield f"{sample.dtype} {sample.shape}".encode()
        yield sample.tobytes() if sample.dtype.kind != "O" else b""
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from _pieces(key)
            yield from _pieces(value)
    elif isinstance(sample, list | tuple):
        yield f"{type(sample).__name__} {len(sample)}".encode()
        for each in sample:
            yield from _pieces(each)
    elif isinstance(sample, bytes):
        yield b"bytes"
        yield sample
    else:
        plain_value = sample is None or isinstance(sample, bool | int | float | str | np.generic)
        yield (repr(sample) if plain_value else type(sample).__name__).encode()
