"""A bucket: the gradients of some parameters, one after the other in one flat tensor.

::

    flat    │ head.bias │ head.weight               │ body.bias │ …
    pieces    (10,)       (10, 512)                   (512,)

DDP decides which parameters share a bucket, and decides anew after the first step. So what a codec
keeps from step to step belongs to a parameter's *name*, never to a bucket or a place in one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """One parameter's place in a flat bucket.

    Args:
        name: The parameter's name in the model.
        offset: Its first element.
        shape: Its shape; a complex parameter's last dimension counts twice.

    Example:
        >>> Piece("head.weight", 10, (10, 512)).numel
        5120
    """

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A flat tensor of gradients and what lies where in it.

    Args:
        flat: The gradients, one-dimensional and real; an exchange leaves the sum here.
        pieces: The parameters in it, which cover it without gaps.

    Example:
        >>> bucket = Bucket.of(torch.zeros(3, dtype=torch.complex64), [("a", (3,))])
        >>> bucket.flat.dtype, bucket.pieces
        (torch.float32, (Piece(name='a', offset=0, shape=(6,)),))
    """

    flat: torch.Tensor
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, flat: torch.Tensor, shapes: Sequence[tuple[str, Sequence[int]]]) -> "Bucket":
        """Returns the bucket over ``flat`` (a view: what is written to one is in the other).

        A complex tensor becomes pairs of reals, so that no codec meets a complex number.

        Args:
            flat: The gradients, one-dimensional.
            shapes: Name and shape of each parameter, in the order in which they lie there.
        """
        pieces, offset = [], 0
        for name, shape in shapes:
            shape = tuple(shape)
            if flat.is_complex():
                shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
            pieces.append(Piece(name, offset, shape))
            offset += pieces[-1].numel
        reals = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return cls(reals, tuple(pieces))

    def view(self, piece: Piece) -> torch.Tensor:
        """Returns the piece of ``flat``, one-dimensional."""
        return self.flat[piece.offset : piece.offset + piece.numel]
