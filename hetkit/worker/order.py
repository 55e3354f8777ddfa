"""Order: the one global order of the samples, and each rank's part of every step.

The order of an epoch is one permutation, the same on all ranks. A step consumes the next slice of
it, whatever the split; the ranks cut that slice by their cumulative batches::

    order   ··│ 17  3 88 42 │  5 61 ·│··        global batch 6, batches (4, 2)
    step s    │── rank 0 ───│─rank 1─│

So every split, every number of ranks and every micro-batch see the same samples in the same step.
"""

from itertools import pairwise

import torch

from hetkit.plan import Plan
from hetkit.planning.batch_split import ratio_split


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
