"""What a trial of codecs and link on the workers found, put together over the ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hetkit.planning.exposure import Transfer
from hetkit.planning.situation import CodecCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a trial of codecs and link on the workers found (`hetkit.worker.trial`).

    Args:
        costs: What each codec costs, by its text.
        transfers: Measured exchanges of two sizes.
        shapes: The gradient's tensors, in the order in which they are ready.
        element_bytes: Size of one element.
        fixed_bytes: Weights, buffers, gradients and optimizer state.
    """

    costs: Mapping[str, CodecCost]
    transfers: tuple[Transfer, ...]
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int
    fixed_bytes: float

    @property
    def tensor_bytes(self) -> tuple[float, ...]:
        """Sizes of the gradient's tensors."""
        return tuple(float(math.prod(shape) * self.element_bytes) for shape in self.shapes)

    @classmethod
    def of(cls, ranks: Sequence[Any]) -> Self:
        """Puts together what all ranks found (`hetkit.worker.trial.Findings`).

        All ranks encode at once and wait for the slowest. Of a transfer, the rank that came last
        waited least: its time is the link's alone.
        """
        first = ranks[0]
        same = zip(*(rank.transfers for rank in ranks), strict=True)
        return cls(
            costs={
                text: max((rank.costs[text] for rank in ranks), key=lambda cost: cost.element_s)
                for text in first.costs
            },
            transfers=tuple(min(each, key=lambda transfer: transfer.seconds) for each in same),
            shapes=first.shapes,
            element_bytes=first.element_bytes,
            fixed_bytes=max(rank.fixed_bytes for rank in ranks),
        )
