"""What a trial of codecs and link on the workers found, put together over the ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.exposure import LinkFit, Transfer
from hetkit.planning.situation import CodecCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a trial of codecs and link on the workers found (`hetkit.worker.trial`).

    Args:
        costs: What each codec costs, by its text.
        transfers: Measured exchanges of two sizes.
        wire_s: What each codec's exchange of all buckets took on the link.
        bucket_bytes: Sizes of those buckets.
        shapes: The gradient's tensors, in the order in which they are ready.
        element_bytes: Size of one element.
        fixed_bytes: Weights, buffers, gradients and optimizer state.
    """

    costs: Mapping[str, CodecCost]
    transfers: tuple[Transfer, ...]
    wire_s: Mapping[str, float]
    bucket_bytes: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int
    fixed_bytes: float

    @property
    def tensor_bytes(self) -> tuple[float, ...]:
        """Sizes of the gradient's tensors."""
        return tuple(float(math.prod(shape) * self.element_bytes) for shape in self.shapes)

    def costs_over(self, link: LinkFit, world_size: int) -> dict[str, CodecCost]:
        """Returns the costs, with what each codec took on a link beyond hops and bytes."""
        costs = dict(self.costs)
        for text, seconds in self.wire_s.items():
            cost = costs[text]
            hops = cost.half_rounds * (world_size - 1)
            expected_s = sum(
                link.seconds(hops, ring_bytes(world_size, size) * cost.ring_share)
                for size in self.bucket_bytes
            )
            beyond_s = max(0.0, seconds - expected_s) / len(self.bucket_bytes)
            costs[text] = replace(cost, bucket_s=beyond_s)
        return costs

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
            wire_s={text: _wire_s([rank.spans[text] for rank in ranks]) for text in first.spans},
            bucket_bytes=first.bucket_bytes,
            shapes=first.shapes,
            element_bytes=first.element_bytes,
            fixed_bytes=max(rank.fixed_bytes for rank in ranks),
        )


def _wire_s(ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """Returns the median exchange: of each collective, the time of the rank that came last."""
    repeats = zip(*ranks, strict=True)
    whole = [math.fsum(min(same) for same in zip(*spans, strict=True)) for spans in repeats]
    return median(whole)
