"""Sampling: an epoch's order as the user's own sampler draws it."""

import operator
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from hetkit.errors import DataError
from hetkit.worker.randomness import aside, sample_seeds, seed_all

_ORDER = -2  # in the place of a sample's index
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def draw(
    sampler: Any, source: Any, samples: int, *, seed: int, epoch: int, limit: int | None
) -> torch.Tensor:
    """Returns the indices of an epoch, in order, as ``sampler`` draws them.

    What it draws depends on the seed and the epoch alone: it gets ``set_epoch(epoch)`` where it
    has that, its own ``generator`` is seeded, and so are the global generators around it.

    Args:
        sampler: A ``torch.utils.data.Sampler`` or another iterable of indices, or a callable
            ``(dataset, generator)`` that returns one.
        source: The dataset, for a callable.
        samples: Samples in the dataset.
        seed: The session's seed.
        epoch: The epoch.
        limit: Indices to take, of what may be endless; None: all.

    Returns:
        The indices, of shape (epoch's samples,) and type int64.

    Raises:
        DataError: It gives something other than indices of the dataset, or none, or fewer than
            ``limit``.
    """
    _refuse_spreading(sampler)
    number = sample_seeds(seed, epoch, [_ORDER])[0]
    with aside():
        seed_all(number)
        indices = _as_tensor(_ask(sampler, source, number, epoch), limit)
    if limit is not None and len(indices) < limit:
        raise DataError(
            f"the sampler drew {len(indices)} indices, and epoch_samples is {limit}: leave "
            "epoch_samples out, or let the sampler go on."
        )
    if len(indices) == 0:
        raise DataError("the sampler drew no index: an epoch needs at least one sample.")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= samples:
        raise DataError(
            f"the sampler drew index {low if low < 0 else high}, and the data has {samples} "
            f"samples: indices are 0 to {samples - 1}."
        )
    return indices


def repetitions(indices: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Returns how often each index came before in the order; None where all differ.

    Example:
        >>> repetitions(torch.tensor([7, 3, 7, 7])).tolist()
        [0, 0, 1, 2]
    """
    order = indices.numpy()
    by_index = np.argsort(order, kind="stable")
    sorted_order = order[by_index]
    places = np.arange(len(order))
    first_of_its_kind = np.r_[True, sorted_order[1:] != sorted_order[:-1]]
    if first_of_its_kind.all():
        return None
    repeats = np.empty_like(places)
    repeats[by_index] = places - np.maximum.accumulate(np.where(first_of_its_kind, places, 0))
    return repeats


def _refuse_spreading(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler | BatchSampler):
        raise DataError(
            f"a {type(sampler).__name__} does what hetkit does: it splits the order into ranks or "
            "batches. Give a sampler of single samples over the whole data."
        )


def _ask(sampler: Any, source: Any, number: int, epoch: int) -> Any:
    if not hasattr(sampler, "__iter__"):
        return sampler(source, torch.Generator().manual_seed(number))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    return sampler


def _as_tensor(drawn: Any, limit: int | None) -> torch.Tensor:
    if not isinstance(drawn, torch.Tensor | np.ndarray):
        if not isinstance(drawn, Iterable):
            raise DataError(
                f"the sampler returned {type(drawn).__name__}: return an iterable of indices."
            )
        drawn = [_index(each) for each in islice(drawn, limit)]
    indices = torch.as_tensor(drawn, device="cpu")[:limit]
    if indices.ndim != 1 or (len(indices) and indices.dtype not in _INTEGERS):
        raise DataError(
            f"the sampler gave {indices.dtype} of shape {tuple(indices.shape)}: an epoch's order "
            "is one row of ints."
        )
    return indices.to(torch.int64)


def _index(each: Any) -> int:
    try:
        if isinstance(each, bool | np.bool_):
            raise TypeError("a mask is not an order")
        return operator.index(each)
    except TypeError as error:
        raise DataError(f"the sampler gave {each!r}: it must give one int at a time.") from error
