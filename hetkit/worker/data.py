"""Data: whatever the user gave, as samples that are fetched by index; batches on their way."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from hetkit.errors import DataError
from hetkit.task import Task, is_stream
from hetkit.worker.randomness import aside, sample_seeds, seed_all
from hetkit.worker.stream import StreamSamples

Collate = Callable[[list[Any]], Any]

_COLLATE = 0x5DEECE66D  # tells a batch's randomness from that of its first sample


class Samples(Protocol):
    """A view by index on whatever the user gave.

    Attributes:
        source: The user's own data.
    """

    source: Any

    def __len__(self) -> int: ...

    def fetch(
        self, indices: Sequence[int], *, epoch: int = 0, repeats: Sequence[int] | None = None
    ) -> Any:
        """Returns the batch of these samples.

        What is random in a sample depends on its index, the epoch, and how often the index came
        before in the epoch (``repeats``; None: never), not on who fetches it and when.
        """


class ArraySamples:
    """Samples that are rows of tensors or arrays: a batch is one indexing operation.

    Args:
        parts: Tensors or arrays with equal first dimensions.
        single: A batch is the tensor itself, not a tuple of one.
    """

    def __init__(self, parts: Sequence[Any], *, single: bool) -> None:
        self.parts = tuple(torch.as_tensor(part) for part in parts)
        self.source: Any = self.parts[0] if single else self.parts
        self._single = single
        lengths = {len(part) for part in self.parts}
        if len(lengths) != 1:
            raise DataError(f"the parts of data differ in length: {sorted(lengths)}.")

    def __len__(self) -> int:
        return len(self.parts[0])

    def fetch(
        self, indices: Sequence[int], *, epoch: int = 0, repeats: Sequence[int] | None = None
    ) -> Any:
        """Returns the rows ``indices`` of every part."""
        rows = torch.as_tensor(indices)
        batch = tuple(part[rows] for part in self.parts)
        return batch[0] if self._single else batch


class DatasetSamples:
    """A map-style dataset with a collate function.

    Args:
        dataset: The user's.
        collate: Turns a list of samples into a batch; None for PyTorch's ``default_collate``.
        seed: The session's seed.
        seeded: Seed the global generators for each sample, so that augmentation does not depend on
            the split. The samples are then asked for one by one, and the ``collate`` of a batch is
            seeded by its first sample.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None, *, seed: int = 0, seeded: bool = True
    ) -> None:
        self.source = dataset
        self._collate: Collate = collate or default_collate
        self._seed = seed
        # Nothing is random in a container, nor in PyTorch's collate.
        self._fixed = not seeded or _is_container(dataset)
        self._seeded = seeded and not (self._fixed and collate is None)
        own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
        self._only_many = own is Dataset.__getitem__

    def __len__(self) -> int:
        return len(self.source)

    def fetch(
        self, indices: Sequence[int], *, epoch: int = 0, repeats: Sequence[int] | None = None
    ) -> Any:
        """Returns the collated samples."""
        if not self._seeded:
            return self._collate(self._all(indices))
        seeds = sample_seeds(self._seed, epoch, indices, repeats)
        with aside():
            samples = self._all(indices) if self._fixed else list(self._each(indices, seeds))
            seed_all(seeds[0] ^ _COLLATE)
            return self._collate(samples)

    def _all(self, indices: Sequence[int]) -> Any:
        if hasattr(self.source, "__getitems__"):
            return self.source.__getitems__(list(indices))
        return [self.source[index] for index in indices]

    def _each(self, indices: Sequence[int], seeds: Sequence[int]) -> Iterator[Any]:
        for index, seed in zip(indices, seeds, strict=True):
            seed_all(seed)
            yield self._all([index])[0] if self._only_many else self.source[index]


def _is_container(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (list, tuple, TensorDataset)


class _Anew:
    """A callable that returns an iterator, such as a generator function, as a stream."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def open_training(task: Task, seed: int) -> Samples:
    """Returns the task's training set.

    Raises:
        DataError: As `open_samples`.
    """
    return open_samples(
        task.data,
        task.collate,
        seed=seed,
        seeded=task.seed_samples,
        stream_length=lambda stream: task.epoch_samples or _own_length(stream),
    )


def open_validation(task: Task, seed: int) -> Samples | None:
    """Returns the task's validation set, None for none.

    Each sample counts once, so a stream without a length is read through to count its samples.

    Raises:
        DataError: As `open_samples`.
    """
    if task.validate is None:
        return None
    return open_samples(
        task.validate,
        task.collate,
        seed=seed,
        seeded=task.seed_samples,
        stream_length=_counted,
    )


def _counted(stream: Any) -> int:
    try:
        return len(stream)
    except TypeError:
        return sum(1 for _ in stream)


def _own_length(stream: Any) -> int:
    try:
        return len(stream)
    except TypeError as error:
        raise DataError(
            f"data of type {type(stream).__name__} has no length: say how many samples an epoch "
            "takes from the stream with epoch_samples=…"
        ) from error


def open_samples(
    data: Any,
    collate: Collate | None,
    *,
    seed: int = 0,
    seeded: bool = True,
    stream_length: Callable[[Any], int] = _own_length,
) -> Samples:
    """Returns a view by index on ``data``, in any of the forms that `hetkit.Task` takes.

    Args:
        data: What the user gave.
        collate: The user's collate, or None.
        seed: The session's seed, for what is random in a sample.
        seeded: Whether each sample is seeded.
        stream_length: Tells how many samples an epoch takes from a stream.

    Raises:
        DataError: It has no length or no samples.
    """
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        make, data = data, data()
        if isinstance(data, Iterator):
            data = _Anew(make)
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        raise DataError(
            f"data of type {type(data).__name__} can be read only once, and every epoch reads it "
            "anew: give what makes it (a generator function, say), or an IterableDataset."
        )
    if isinstance(data, DataLoader):
        raise DataError("data is a DataLoader: give its dataset; hetkit makes the batches itself.")
    samples: Samples
    if is_stream(data):
        samples = StreamSamples(data, stream_length(data), collate, seed=seed)
    elif not hasattr(data, "__len__"):
        raise DataError(
            f"data of type {type(data).__name__} has no length: give a map-style dataset "
            "(__len__ and __getitem__), tensors, an IterableDataset, or a callable that makes one."
        )
    else:
        samples = _open_map_style(data, collate, seed=seed, seeded=seeded)
    if len(samples) == 0:
        raise DataError("data has no samples.")
    return samples


def _open_map_style(data: Any, collate: Collate | None, *, seed: int, seeded: bool) -> Samples:
    if isinstance(data, (torch.Tensor, np.ndarray)) and data.ndim == 0:
        raise DataError("data has no dimension: give one with the samples as its first.")
    if isinstance(data, (torch.Tensor, np.ndarray)) and collate is None:
        return ArraySamples([data], single=True)
    if type(data) is TensorDataset and collate is None:
        return ArraySamples(data.tensors, single=False)
    if _is_arrays(data):
        arrays = ArraySamples(data, single=False)
        if collate is None:
            return arrays
        data = TensorDataset(*arrays.parts)
    return DatasetSamples(data, collate, seed=seed, seeded=seeded)


def _is_arrays(data: Any) -> bool:
    return (
        isinstance(data, tuple)
        and len(data) > 0
        and all(isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim > 0 for part in data)
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves every tensor in a batch to ``device``.

    A batch is a tensor, anything with a ``to`` method (a ``PackedSequence``, a tokenizer's batch),
    or a tuple, list, mapping or dataclass of such, nested as you like. The rest stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, dict):
        moved = copy.copy(batch)
        moved.update({key: to_device(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _moved_fields(batch, device)
    return batch


def _moved_fields(batch: Any, device: torch.device) -> Any:
    moved = copy.copy(batch)
    for field in dataclasses.fields(batch):
        value = to_device(getattr(batch, field.name), device)
        object.__setattr__(moved, field.name, value)  # it may be frozen
    return moved
