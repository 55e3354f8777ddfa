"""Streams: data that can only be read from its beginning on, such as an `IterableDataset`.

Every rank reads the same stream and keeps its part of each step, so the rule of the one global
order holds for streams too; the order is the stream's own::

    stream   0 1 2 3 4 5 │ 6 7 8 …          global batch 6, batches (4, 2)
    rank 0   × × × ×                        × kept and collated
    rank 1           × ×                    the others are read and dropped

What is dear and concerns one sample only (decoding, say) belongs into ``collate``: it sees what
the rank keeps.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate

from hetkit.errors import DataError
from hetkit.worker.agreement import fingerprint
from hetkit.worker.randomness import (
    aside,
    generator_states,
    restore_generators,
    sample_seeds,
    seed_all,
)

_OPENING = -1  # in the place of a sample's index


class StreamSamples:
    """A stream as samples, fetched by their places in it.

    Each epoch reads it anew, after ``set_epoch(epoch)`` where the stream has that. While it is
    read, the global generators are its own: seeded by (seed, epoch) and carried on from sample to
    sample, so that a shuffling or augmenting stream is the same on every rank.

    Args:
        stream: What can be iterated again and again.
        length: Samples in an epoch.
        collate: Turns a list of samples into a batch; None for PyTorch's ``default_collate``.
        seed: The session's seed.

    Example:
        >>> StreamSamples(range(10, 20), 4, list, seed=0).fetch([2, 3])
        [12, 13]
    """

    def __init__(
        self,
        stream: Any,
        length: int,
        collate: Callable[[list[Any]], Any] | None,
        *,
        seed: int = 0,
    ) -> None:
        self.source = stream
        self._first: int | None = None
        self._length = length
        self._collate = collate or default_collate
        self._seed = seed
        self.close()

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        """Lets go of the open stream; the next fetch reads it from the beginning."""
        self._reader: Iterator[Any] | None = None
        self._epoch = 0
        self._place = 0
        self._process = os.getpid()
        self._generators: tuple[Any, ...] = ()

    def fetch(
        self, indices: Sequence[int], *, epoch: int = 0, repeats: Sequence[int] | None = None
    ) -> Any:
        """Reads on to these places, which must ascend, and returns them as a batch.

        Going back to an earlier place reads the epoch's stream again from its beginning.

        Raises:
            DataError: The stream ended before the epoch did.
        """
        # A forked process must not read on in what its parent has opened: they share the place.
        stranger = self._reader is None or self._process != os.getpid()
        if stranger or epoch != self._epoch or indices[0] < self._place:
            self._open(epoch)
        with aside():
            restore_generators(self._generators)
            samples = [self._read(place) for place in indices]
            self._generators = generator_states()
            seed_all(sample_seeds(self._seed, epoch, indices[:1])[0])
            return self._collate(samples)

    def first(self) -> int:
        """Returns the fingerprint of the first sample ever read, and reads one if none was."""
        if self._first is None:
            self.fetch([0])
        return self._first or 0

    def _open(self, epoch: int) -> None:
        self.close()
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        with aside():
            seed_all(sample_seeds(self._seed, epoch, [_OPENING])[0])
            self._reader = iter(self.source)
            self._generators = generator_states()
        self._epoch = epoch

    def _read(self, place: int) -> Any:
        try:
            while True:
                sample = next(self._reader)  # type: ignore[arg-type]
                if self._first is None:
                    self._first = fingerprint(sample)
                self._place += 1
                if self._place > place:
                    return sample
        except StopIteration:
            raise DataError(
                f"the stream ended after {self._place} samples of epoch {self._epoch + 1}, and an "
                f"epoch has {self._length}: give epoch_samples={self._place} or fewer, or a stream "
                "that goes on."
            ) from None
