"""Packing: gathers what a codec compresses, and what it leaves as it is, out of a bucket.

::

    bucket   │ bias │ weight        │ bias │ weight     │
                  ╲      │              ╲       │
    raw      │ bias · bias │      compressed │ weight · weight │
"""

from collections.abc import Sequence

import torch

from hetkit.compression import Selective
from hetkit.planning.codec_bytes import is_compressed
from hetkit.worker.codecs.bucket import Bucket, Piece


class Run:
    """Some pieces of a bucket, moved together: neighbours travel in one copy.

    Args:
        pieces: The pieces, by offset.

    Example:
        >>> run = Run([Piece("a", 0, (2,)), Piece("b", 2, (3,)), Piece("c", 7, (1,))])
        >>> run.elements, run.places
        (6, [(0, 0, 5), (7, 5, 1)])
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self.starts: list[int] = []
        self.places: list[tuple[int, int, int]] = []
        self.elements = 0
        for piece in pieces:
            self.starts.append(self.elements)
            self._extend(piece.offset, piece.numel)
            self.elements += piece.numel

    def pack(self, flat: torch.Tensor, packed: torch.Tensor) -> None:
        """Copies the pieces out of a bucket's ``flat``."""
        for offset, start, length in self.places:
            packed[start : start + length].copy_(flat[offset : offset + length])

    def unpack(self, packed: torch.Tensor, flat: torch.Tensor) -> None:
        """Copies the pieces back."""
        for offset, start, length in self.places:
            flat[offset : offset + length].copy_(packed[start : start + length])

    def parts(self, packed: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Returns each piece's name and its part of ``packed``, a view."""
        return [
            (piece.name, packed[start : start + piece.numel])
            for piece, start in zip(self.pieces, self.starts, strict=True)
        ]

    def _extend(self, offset: int, length: int) -> None:
        if self.places:
            before, start, known = self.places[-1]
            if before + known == offset:
                self.places[-1] = (before, start, known + length)
                return
        self.places.append((offset, self.elements, length))


def choose(bucket: Bucket, spec: Selective) -> tuple[Run, Run]:
    """Returns what is compressed of a bucket, and what travels as it is."""
    size = bucket.flat.element_size()
    chosen = [is_compressed(spec, piece.shape, size) for piece in bucket.pieces]
    yes = [piece for piece, is_in in zip(bucket.pieces, chosen, strict=True) if is_in]
    no = [piece for piece, is_in in zip(bucket.pieces, chosen, strict=True) if not is_in]
    return Run(yes), Run(no)
