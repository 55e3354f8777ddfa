'''What a gradient codec is: a way to sum one bucket over all ranks.

A codec sees buckets of gradients and the `Wire` that carries tensors between the ranks. It leaves
the sum over all ranks in the bucket. It never sees optimizers or models, so a new one is one file:
beside this one with a line in `hetkit.worker.codecs.registry`, or a class of your own, given to the
task and named ``"task:key"``::

    from hetkit.worker.codecs.codec import Codec

    class Signs(Codec):
        """One byte an element: its sign, and the bucket's mean size beside it."""

        name = "signs"

        def exchange(self, bucket, wire):
            size = bucket.flat.abs().mean().reshape(1)      # NaN where one element is: it travels
            signs = bucket.flat.sign().to(torch.int8)
            wire.all_reduce(signs)                          # up to 127 ranks
            wire.all_reduce(size)
            bucket.flat.copy_(signs * size / wire.world_size)

        def wire_bytes(self, pieces, element_bytes, world_size):
            elements = sum(piece.numel for piece in pieces)
            return 2 * (world_size - 1) / world_size * (elements + element_bytes)

    task = hk.Task(..., codecs={"signs": Signs})
    session = hk.Session(task, compression="task:signs")
'''

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hetkit.worker.codecs.bucket import Bucket, Piece


class Wire(Protocol):
    """Carries tensors between the ranks; stamps, counts and (where emulated) delays them."""

    world_size: int
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor`` over all ranks, in place."""

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Sends the r-th of equal parts of ``input`` to rank r; ``output`` holds what came."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Fills ``output`` with every rank's ``input``, in rank order."""

    def stamp(self, start: float) -> None:
        """Counts what ran since ``start`` (of ``time.monotonic``) as one collective."""


class Codec(Protocol):
    """Sums buckets over the ranks, in its own form on the wire. Subclass it: the rest is optional.

    Attributes:
        name: What the settings call it, without parameters.
        as_it_is: Whether a bucket travels as it is, so that its exchange is one plain sum.
        feeds_back: Whether what did not travel is added to a later step's gradient. That suits
            optimizers that are linear in the gradient (SGD), not those of Adam's kind.
    """

    name: str
    as_it_is: bool = False
    feeds_back: bool = False

    def exchange(self, bucket: Bucket, wire: Wire) -> None:
        """Replaces ``bucket.flat`` by its sum over all ranks, as exactly as the codec can.

        Every rank must end with bit-equal contents, and a non-finite element on any rank must
        leave one on all: the step is then skipped everywhere. What the codec keeps from step to
        step changes only in `settle`. Each parameter comes once a step.
        """

    def settle(self, good: bool) -> None:
        """Ends the step: keeps what is pending of it, or drops that where the step is skipped."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: tensors, numbers, text.

        What lies under ``"residuals"`` is this rank's own; all else is the same on every rank.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's state."""
        return

    def residual_norm(self) -> float | None:
        """Returns the Euclidean norm of what waits on this rank; None where nothing ever does."""
        return None

    def wire_bytes(self, pieces: Sequence[Piece], element_bytes: int, world_size: int) -> float:
        """Returns the bytes that one rank sends for a bucket, without compressing anything.

        Args:
            pieces: What is in the bucket.
            element_bytes: Size of one (real) element.
            world_size: Ranks.
        """
