"""Data: the one global order of the samples, and each rank's part of every step.

The order of an epoch is one permutation, the same on all ranks. A step consumes the next slice of
it, whatever the split; the ranks cut that slice by their cumulative batches::

    order   ··│ 17  3 88 42 │  5 61 ·│··        global batch 6, batches (4, 2)
    step s    │── rank 0 ───│─rank 1─│

So every split, every number of ranks and every micro-batch see the same samples in the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from hetkit.errors import DataError
from hetkit.plan import Plan
from hetkit.planning.batch_split import ratio_split

Collate = Callable[[list[Any]], Any]


class Samples(Protocol):
    """A map-style view on whatever the user gave."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int]) -> Any:
        """Returns the batch of these samples."""


class ArraySamples:
    """Samples that are rows of tensors or arrays: a batch is one indexing operation.

    Args:
        parts: Tensors or arrays with equal first dimensions.
        single: A batch is the tensor itself, not a tuple of one.
    """

    def __init__(self, parts: Sequence[Any], *, single: bool) -> None:
        self.parts = tuple(torch.as_tensor(part) for part in parts)
        self._single = single
        lengths = {len(part) for part in self.parts}
        if len(lengths) != 1:
            raise DataError(f"the parts of data differ in length: {sorted(lengths)}.")

    def __len__(self) -> int:
        return len(self.parts[0])

    def fetch(self, indices: Sequence[int]) -> Any:
        """Returns the rows ``indices`` of every part."""
        rows = torch.as_tensor(indices)
        batch = tuple(part[rows] for part in self.parts)
        return batch[0] if self._single else batch


class DatasetSamples:
    """A map-style dataset with a collate function."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset = dataset
        self.collate: Collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Sequence[int]) -> Any:
        """Returns the collated samples."""
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(list(indices)))
        return self.collate([self.dataset[index] for index in indices])


def open_samples(data: Any, collate: Collate | None) -> ArraySamples | DatasetSamples:
    """Returns a map-style view on ``data``, in any of the forms that `hetkit.Task` takes.

    Raises:
        DataError: It has no length or no samples.
    """
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    samples: ArraySamples | DatasetSamples
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise DataError(
            f"data of type {type(data).__name__} has no length: give a map-style dataset "
            "(__len__ and __getitem__), tensors, or a callable that makes one."
        )
    if isinstance(data, (torch.Tensor, np.ndarray)) and data.ndim == 0:
        raise DataError("data has no dimension: give one with the samples as its first.")
    if isinstance(data, (torch.Tensor, np.ndarray)) and collate is None:
        samples = ArraySamples([data], single=True)
    elif type(data) is TensorDataset and collate is None:
        samples = ArraySamples(data.tensors, single=False)
    elif _is_arrays(data):
        samples = ArraySamples(data, single=False)
        if collate is not None:
            samples = DatasetSamples(TensorDataset(*samples.parts), collate)
    else:
        samples = DatasetSamples(data, collate)
    if len(samples) == 0:
        raise DataError("data has no samples.")
    return samples


def _is_arrays(data: Any) -> bool:
    return (
        isinstance(data, tuple)
        and len(data) > 0
        and all(isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim > 0 for part in data)
    )


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


class Loader:
    """Fetches micro-batches, in the rank itself or ahead of time in DataLoader processes.

    Args:
        samples: What to fetch from.
        num_workers: DataLoader processes; 0 for none. They live in the rank's process group.
    """

    def __init__(self, samples: ArraySamples | DatasetSamples, num_workers: int) -> None:
        self._samples = samples
        self._schedule: list[list[int]] = []
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] = iter(())
        if num_workers:
            dataset, collate = _as_dataset(samples)
            self._loader = DataLoader(
                dataset,
                batch_sampler=_Schedule(self),
                num_workers=num_workers,
                collate_fn=collate,
                persistent_workers=True,
            )

    def start(self, schedule: list[list[int]]) -> None:
        """Takes the index lists of the micro-batches to come; drops what was fetched ahead."""
        self._schedule = schedule
        if self._loader is not None:
            self._batches = iter(self._loader)
        else:
            self._batches = map(self._samples.fetch, schedule)

    def next(self) -> Any:
        """Returns the next micro-batch."""
        return next(self._batches)


class _Schedule:
    """The loader's current index lists, as the batch sampler that a DataLoader wants."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._loader._schedule)

    def __len__(self) -> int:
        return len(self._loader._schedule)


class _Rows(Dataset[Any]):
    """An `ArraySamples` as a dataset that fetches a whole batch at once."""

    def __init__(self, samples: ArraySamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, indices: list[int]) -> Any:
        return self._samples.fetch(indices)


def _as_dataset(samples: ArraySamples | DatasetSamples) -> tuple[Dataset[Any], Collate]:
    if isinstance(samples, DatasetSamples):
        return samples.dataset, samples.collate
    return _Rows(samples), _as_it_is


def _as_it_is(batch: Any) -> Any:
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves every tensor in a batch of tuples, lists and mappings to ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
