"""The largest elements travel, the rest waits: top-k, exact or by a threshold found on a sample.

Each rank sends its k largest of every segment to the segment's owner, which adds them up and sends
the k largest of the sum to all: the bytes do not grow with the world size. Values travel as they
are, with 16 bits of place beside each. What a rank did not pick waits as its residual, and what the
owner did not pick of the sum waits with the owner, in its own residual of those elements: so after
every step, to rounding,

    Σ steps of what arrived + Σ ranks of what waits = Σ steps, Σ ranks of what was given

and what one top-k leaves of a segment x of n elements is bounded, ‖rest‖² ≤ (1 − k/n)·‖x‖². The
threshold sends k elements too, the first that pass it: no more than ‖x‖ is left.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hetkit.compression import Threshold, TopK
from hetkit.planning.codec_bytes import code_parts, picks
from hetkit.worker.codecs.feedback import Feedback
from hetkit.worker.codecs.halves import TwoHalves, Work

_SAMPLE = 1024
"""Elements of a segment that the threshold is found on."""


class Largest(TwoHalves):
    """Exact top-k of each segment.

    Args:
        spec: Its parameters.

    Example:
        >>> Largest(TopK(0.01)).feeds_back
        True
    """

    feeds_back = True

    def __init__(self, spec: TopK | Threshold) -> None:
        super().__init__(spec)
        self._ratio = spec.ratio
        self._feedback = Feedback()

    def settle(self, good: bool) -> None:
        """Keeps the step's residuals, or drops them."""
        super().settle(good)
        self._feedback.settle(good)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by parameter name."""
        return {"residuals": self._feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes residuals."""
        self._feedback.load_state_dict(state.get("residuals", {}))

    def residual_norm(self) -> float | None:
        """The norm of what waits on this rank."""
        return self._feedback.norm()

    def _code_types(
        self, compressed: int, dtype: torch.dtype, world_size: int
    ) -> list[tuple[int, torch.dtype]]:
        _, values, places = code_parts(self._spec, compressed, dtype.itemsize, world_size)
        sent = dtype if dtype.itemsize <= 4 else torch.float32
        return [(1, torch.float32), (values[0], sent), (places[0], torch.int16)]

    def _encode_mine(self, work: Work, rank: int) -> None:
        for name, values in work.compressed.parts(work.packed):
            self._feedback.add(name, values)
        # What is not finite may be picked or not: a flag tells the others in any case.
        work.out.parts[1].copy_((work.values.amax() * 0 + work.values.amin() * 0).expand(1, 1))
        self._move(work.values, work.out.parts[2], work.out.parts[3])

    def _add_up(self, work: Work, rank: int) -> None:
        _, flags, values, places = work.came.parts
        shard = work.shard.zero_()
        shape = (len(values), *shard.shape[1:-1], -1)
        sent, at = values.reshape(shape).to(shard.dtype), _places(places.reshape(shape))
        for each, where in zip(sent, at, strict=True):
            shard[0].scatter_add_(-1, where, each)
        self._move(shard, work.mine.parts[2], work.mine.parts[3])
        work.mine.parts[1].copy_(flags.sum(0, keepdim=True))
        work.values[rank] += shard[0]
        for name, rest in work.compressed.parts(work.packed):
            self._feedback.put(name, rest)

    def _decode_all(self, work: Work) -> None:
        _, _, values, places = work.came.parts
        shape = (*work.values.shape[:-1], -1)
        at = _places(places.reshape(shape))
        work.values.zero_().scatter_(-1, at, values.reshape(shape).to(work.values.dtype))

    def _finish(self, work: Work, flat: torch.Tensor) -> None:
        flat[:1] += work.came.parts[1].sum().to(flat.dtype)

    def _move(self, values: torch.Tensor, sent: torch.Tensor, places: torch.Tensor) -> None:
        """Writes the picked elements to the message and leaves in ``values`` what is not sent."""
        at = self._pick(values, picks(self._ratio, values.shape[-1]))
        picked = values.gather(-1, at)
        rows = len(values)
        sent.copy_(picked.view(rows, -1))
        places.copy_(at.view(rows, -1))  # the low 16 bits
        values.scatter_(-1, at, picked - sent.reshape(at.shape).to(picked.dtype))

    def _pick(self, values: torch.Tensor, count: int) -> torch.Tensor:
        return values.abs().topk(count, dim=-1, sorted=False).indices


class Passing(Largest):
    """About the largest: what passes a threshold that is found on a sample of the segment.

    Args:
        spec: Its parameters.

    Example:
        >>> Passing(Threshold()).name
        'threshold'
    """

    def _pick(self, values: torch.Tensor, count: int) -> torch.Tensor:
        sizes = values.abs()
        length = values.shape[-1]
        sample = sizes[..., :: max(1, length // _SAMPLE)]
        among = max(1, round(sample.shape[-1] * count / length))
        limits = sample.topk(among, dim=-1).values[..., -1:]
        # A sum of picks is mostly zeros, and so is its sample.
        passed = sizes >= limits.clamp(min=torch.finfo(sizes.dtype).smallest_normal)
        rows = [_first(row, count) for row in passed.view(-1, length)]
        return torch.stack(rows).view(*values.shape[:-1], count)


def _first(passed: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the places of the first that pass, and of the first others if they are too few."""
    places = passed.nonzero().view(-1)[:count]
    if len(places) < count:
        others = passed.logical_not().nonzero().view(-1)[: count - len(places)]
        places = torch.cat([places, others])
    return places


def _places(low_bits: torch.Tensor) -> torch.Tensor:
    return low_bits.to(torch.int64) & 0xFFFF
