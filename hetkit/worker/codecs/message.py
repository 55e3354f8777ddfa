"""A message: equal rows of bytes, one for each rank, whose parts are read and written in place."""

import math
from collections.abc import Sequence

import torch

from hetkit.planning.codec_bytes import row_bytes


class Message:
    """Rows of typed parts in one flat tensor of bytes, which is what travels.

    Args:
        rows: How many.
        parts: ``(count, dtype)`` of what each row holds.
        device: Where it lies.

    Attributes:
        bytes: All of it, one-dimensional.
        parts: Views of the parts, each of shape (rows, count).

    Example:
        >>> message = Message(2, [(1, torch.float32), (3, torch.int8)], torch.device("cpu"))
        >>> [tuple(part.shape) for part in message.parts], message.bytes.numel()
        ([(2, 1), (2, 3)], 32)
    """

    def __init__(
        self, rows: int, parts: Sequence[tuple[int, torch.dtype]], device: torch.device
    ) -> None:
        width = row_bytes([(count, dtype.itemsize) for count, dtype in parts])
        self.bytes = torch.zeros(rows * width, dtype=torch.uint8, device=device)
        table = self.bytes.view(rows, width)
        views, start = [], 0
        for count, dtype in parts:
            end = start + count * dtype.itemsize
            views.append(table[:, start:end].view(dtype))
            start = math.ceil(end / 8) * 8
        self.parts = tuple(views)
