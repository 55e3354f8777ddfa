"""Loader: micro-batches, fetched in the rank itself or ahead of time in DataLoader processes."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hetkit.errors import DataError
from hetkit.worker.data import Samples
from hetkit.worker.order import Draw
from hetkit.worker.stream import StreamSamples


class Loader:
    """Fetches micro-batches.

    Args:
        samples: What to fetch from.
        num_workers: DataLoader processes; 0 for none. They live in the rank's process group.
        pin_memory: Copy the batches into memory from which a GPU takes them faster.

    Raises:
        DataError: A stream with several processes, each of which would read all of it.
    """

    def __init__(self, samples: Samples, num_workers: int, *, pin_memory: bool = False) -> None:
        self._samples = samples
        self._draws: Iterable[Draw] = ()
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] = iter(())
        if isinstance(samples, StreamSamples) and num_workers > 1:
            raise DataError(
                f"a stream is read from its beginning on by one process per rank, and "
                f"num_workers is {num_workers}: give 1 to read ahead, or 0."
            )
        if num_workers or pin_memory:
            self._loader = DataLoader(
                _Fetching(samples),
                batch_sampler=_Draws(self),
                num_workers=num_workers,
                collate_fn=_as_it_is,
                pin_memory=pin_memory,
                persistent_workers=num_workers > 0,
                # Classes from a notebook's cells are in memory only: a fork has them.
                multiprocessing_context="fork" if num_workers else None,
            )

    def start(self, draws: Iterable[Draw]) -> None:
        """Takes the micro-batches to come; drops what was fetched ahead."""
        self._draws = draws
        if self._loader is not None:
            self._batches = iter(self._loader)
        else:
            self._batches = (_fetch(self._samples, draw) for draw in draws)

    def next(self) -> Any:
        """Returns the next micro-batch."""
        return next(self._batches)

    def fetch(self, draw: Draw) -> Any:
        """Returns a micro-batch that was not among those to come, fetched in the rank itself."""
        return _fetch(self._samples, draw)

    def close(self) -> None:
        """Ends the DataLoader processes."""
        self._batches, self._loader = iter(()), None


def _fetch(samples: Samples, draw: Draw) -> Any:
    return samples.fetch(draw.indices, epoch=draw.epoch, repeats=draw.repeats)


class _Draws:
    """The loader's present draws, as the batch sampler that a DataLoader wants."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader._draws)


class _Fetching(Dataset[Any]):
    """Samples as a dataset that fetches a whole draw at once, collated."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitems__(self, draw: Draw) -> Any:
        return _fetch(self._samples, draw)


def _as_it_is(batch: Any) -> Any:
    return batch
