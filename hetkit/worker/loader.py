"""Loader: micro-batches, fetched in the rank itself or ahead of time in DataLoader processes."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hetkit.worker.data import ArraySamples, Collate, DatasetSamples


class Loader:
    """Fetches micro-batches.

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
