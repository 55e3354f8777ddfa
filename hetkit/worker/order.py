"""Order: the one global order of the samples, and each rank's part of every step.

The order of an epoch is the same on all ranks. A step consumes the next slice of it, whatever the
split; the ranks cut that slice by their cumulative batches::

    order   ··│ 17  3 88 42 │  5 61 ·│··        global batch 6, batches (4, 2)
    step s    │── rank 0 ───│─rank 1─│

So every split, every number of ranks and every micro-batch see the same samples in the same step.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetkit.errors import DataError
from hetkit.plan import Plan
from hetkit.planning.batch_split import ratio_split
from hetkit.worker.agreement import require_same
from hetkit.worker.data import Samples
from hetkit.worker.rounds import rank_pieces
from hetkit.worker.sampling import draw, repetitions
from hetkit.worker.stream import StreamSamples


class Draw(NamedTuple):
    """A micro-batch to fetch: its samples, the epoch, and how often each came before in it."""

    indices: Sequence[int]
    epoch: int
    repeats: Sequence[int] | None = None


class EpochOrder:
    """The order of each epoch's samples.

    A permutation without a sampler, which every rank works out for itself; a stream's own order;
    or what the user's sampler draws on rank 0, sent to all, so that even a sampler that cannot be
    reproduced keeps the ranks together.

    Args:
        samples: The training data.
        sampler: The task's, or None.
        seed: The session's seed.
        epoch_samples: Indices to take from the sampler; None: all.
        rank: This rank.
        device: Where the ranks exchange tensors; None: there are no other ranks.

    Example:
        >>> from hetkit.worker.data import open_samples
        >>> order = EpochOrder(open_samples(list("abcd"), None), [2, 0, 2], seed=0)
        >>> order.take(epoch=0)
        3
        >>> order.indices.tolist(), order.repeats.tolist()
        ([2, 0, 2], [0, 0, 1])
    """

    def __init__(
        self,
        samples: Samples,
        sampler: Any = None,
        *,
        seed: int,
        epoch_samples: int | None = None,
        rank: int = 0,
        device: torch.device | None = None,
        in_rounds: bool = False,
    ) -> None:
        _check(samples, sampler, epoch_samples)
        self.epoch: int | None = None
        self.indices = torch.empty(0, dtype=torch.int64)
        self.repeats: Any = None
        self._samples = samples
        self._sampler = sampler
        self._seed = seed
        self._limit = epoch_samples
        self._rank = rank
        self._device = device
        self._in_rounds = in_rounds

    def __len__(self) -> int:
        """Samples in an epoch, the same in all; known once the first was taken."""
        return len(self.indices)

    def take(self, epoch: int) -> int:
        """Makes ``epoch`` the present one, on all ranks at once; returns its samples.

        Raises:
            DataError: The sampler drew another number of samples than for the epoch before.
        """
        if epoch == self.epoch:
            return len(self)
        indices = self._order(epoch)
        if self.epoch is not None and len(indices) != len(self):
            raise DataError(
                f"the sampler drew {len(indices)} samples for epoch {epoch + 1} and {len(self)} "
                f"for epoch {self.epoch + 1}: all epochs must have as many. epoch_samples=… takes "
                "that many from a sampler that goes on."
            )
        self.epoch, self.indices = epoch, indices
        self.repeats = None if self._sampler is None else repetitions(indices)
        return len(self)

    def draws(self, plan: Plan, rank: int) -> Iterator[Draw]:
        """Returns a rank's micro-batches of all the plan's steps, each made when it is due."""
        self.take(plan.epoch)
        return self._draws(plan, rank, self.indices, self.repeats)

    def draw(self, first: int, stop: int) -> Draw:
        """Returns the samples from ``first`` to ``stop`` of the present epoch."""
        before = None if self.repeats is None else self.repeats[first:stop].tolist()
        return Draw(self.indices[first:stop].tolist(), self.epoch or 0, before)

    def pieces(
        self, plan: Plan, start: int, shares: Sequence[int], rank: int
    ) -> list[tuple[int, int]]:
        """Returns a rank's micro-batches of the step whose slice begins at ``start``.

        In rounds (`hetkit.worker.rounds`) every rank has as many, and some may be empty.
        """
        if self._in_rounds and not plan.local:
            return rank_pieces(start, shares, plan.micro_batches, rank)
        return micro_batches(start + sum(shares[:rank]), shares[rank], plan.micro_batches[rank])

    def _draws(self, plan: Plan, rank: int, indices: torch.Tensor, repeats: Any) -> Iterator[Draw]:
        for step in range(plan.first_step, plan.last_step + 1):
            start, shares = step_slice(plan, step, len(indices))
            for a, b in self.pieces(plan, start, shares, rank):
                if b > a:
                    before = None if repeats is None else repeats[a:b].tolist()
                    yield Draw(indices[a:b].tolist(), plan.epoch, before)

    def _order(self, epoch: int) -> torch.Tensor:
        if isinstance(self._samples, StreamSamples):
            if self.epoch is None and self._device is not None:
                require_same(self._samples.first(), self._device)
            return torch.arange(len(self._samples))
        if self._sampler is None:
            return epoch_order(len(self._samples), self._seed, epoch)
        indices = torch.empty(0, dtype=torch.int64)
        if self._rank == 0:
            indices = draw(
                self._sampler,
                self._samples.source,
                len(self._samples),
                seed=self._seed,
                epoch=epoch,
                limit=self._limit,
            )
        return indices if self._device is None else _shared(indices, self._device)


def _check(samples: Samples, sampler: Any, epoch_samples: int | None) -> None:
    stream = isinstance(samples, StreamSamples)
    if stream and sampler is not None:
        raise DataError("a stream is read in its own order: leave sampler out, or shuffle in it.")
    if epoch_samples is not None and sampler is None and not stream:
        raise DataError(
            "epoch_samples is for a stream or a sampler: without either, an epoch has every sample "
            "of data once."
        )


def _shared(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    size = torch.tensor([len(indices)], device=device)
    dist.broadcast(size, src=0)
    whole = indices.to(device) if len(indices) else size.new_empty(int(size.item()))
    dist.broadcast(whole, src=0)
    return whole.cpu()


def epoch_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Returns the epoch's permutation of all samples; equal on all ranks, whatever their number."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator)


def step_slice(plan: Plan, step: int, samples: int) -> tuple[int, tuple[int, ...]]:
    """Returns where the step's slice of the epoch's order starts, and each rank's share of it.

    The epoch's last step takes what is left; it is split in the plan's proportions.
    """
    start = (step - plan.epoch_first_step) * plan.global_batch
    size = min(plan.global_batch, samples - start)
    if size == plan.global_batch:
        return start, plan.batches
    return start, ratio_split(plan.batches, size)


def micro_batches(first: int, count: int, largest: int) -> list[tuple[int, int]]:
    """Cuts ``count`` samples from ``first`` on into the fewest, most even, micro-batches.

    Returns:
        ``(start, stop)`` pairs; none for no samples.

    Example:
        >>> micro_batches(10, 7, 3)
        [(10, 13), (13, 15), (15, 17)]
    """
    if count == 0:
        return []
    pieces = -(-count // largest)
    edges = [first + (count * piece + pieces - 1) // pieces for piece in range(pieces + 1)]
    return list(pairwise(edges))
