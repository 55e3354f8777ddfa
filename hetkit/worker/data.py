"""Data: whatever the user gave, as samples that are fetched by index; batches on their way."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from hetkit.errors import DataError

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
