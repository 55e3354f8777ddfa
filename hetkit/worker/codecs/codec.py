"""What a gradient codec is: a way to sum one bucket over all ranks.

A codec sees a flat bucket of gradients and the `Wire` that carries tensors between the ranks. It
leaves the sum over all ranks in the bucket. It never sees optimizers, models or steps, so a new
one is one file beside this one and a line in `hetkit.worker.codecs.registry`.
"""

from typing import Protocol

import torch


class Wire(Protocol):
    """Carries tensors between the ranks; stamps, counts and (where emulated) delays them."""

    world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor`` over all ranks, in place."""


class Codec(Protocol):
    """Sums buckets over the ranks, in its own form on the wire.

    Attributes:
        name: What the settings call it.
        as_it_is: Whether a bucket travels as it is, so that its exchange is one plain sum.
    """

    name: str
    as_it_is: bool

    def exchange(self, bucket: torch.Tensor, wire: Wire) -> None:
        """Replaces the flat ``bucket`` by its sum over all ranks.

        Every rank must end with bit-equal contents, and a non-finite element on any rank must
        leave a non-finite element on all: the step is then skipped everywhere.
        """

    def wire_bytes(self, elements: int, element_bytes: int, world_size: int) -> float:
        """Returns the bytes that one rank sends for a bucket, without sending them.

        A complex element counts as two real ones.
        """
