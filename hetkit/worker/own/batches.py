"""Batches of an own loop: this rank's part of each step, whole, and cut into pieces if need be."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hetkit.errors import DataError
from hetkit.plan import Plan
from hetkit.worker.data import Samples, open_samples, to_device
from hetkit.worker.loader import Loader
from hetkit.worker.order import Draw, EpochOrder, step_slice


class Batches:
    """The training set of an own loop, and the place in it.

    Args:
        data: In any of the forms that `hetkit.Task` takes.
        rank: This rank.
        seed: The session's seed.
        device: Where the batches go.
        alone: Whether there are no other ranks.
        collate: Turns a list of samples into a batch; None for PyTorch's own.
        sampler: As in `hetkit.Task`.
        num_workers: DataLoader processes.
        pin_memory: As in PyTorch's DataLoader.
        seed_samples: Whether each sample is seeded by itself.

    Attributes:
        source: The user's data.
    """

    def __init__(
        self,
        data: Any,
        *,
        rank: int,
        seed: int,
        device: torch.device,
        alone: bool,
        collate: Callable[[list[Any]], Any] | None,
        sampler: Any,
        num_workers: int,
        pin_memory: bool,
        seed_samples: bool,
    ) -> None:
        self.source = data
        self._rank = rank
        self._device = device
        self._samples: Samples = open_samples(data, collate, seed=seed, seeded=seed_samples)
        self._order = EpochOrder(
            self._samples, sampler, seed=seed, rank=rank, device=None if alone else device
        )
        self._loader = Loader(self._samples, num_workers, pin_memory=pin_memory)
        self._plan: Plan | None = None

    @property
    def available(self) -> int:
        """Samples in the data, whatever an epoch takes of them."""
        return len(self._samples)

    def begin_epoch(self, epoch: int) -> int:
        """Takes the epoch's order, on all ranks at once; returns its samples."""
        return self._order.take(epoch)

    def shares(self, plan: Plan, step: int) -> tuple[int, ...]:
        """Returns each rank's samples in ``step``."""
        return step_slice(plan, step, len(self._order))[1]

    def next(self, plan: Plan, step: int) -> Any:
        """Returns this rank's samples of ``step``, on its device; without any, an empty batch."""
        if plan is not self._plan:
            self._plan = plan
            self._loader.start(self._draws(plan, step))
        if self.shares(plan, step)[self._rank]:
            return to_device(self._loader.next(), self._device)
        one = self._samples.fetch(self._order.indices[:1].tolist(), epoch=plan.epoch)
        return to_device(cut(one, 0, 0, size=1), self._device)

    def _draws(self, plan: Plan, first_step: int) -> Iterator[Draw]:
        indices, repeats = self._order.indices, self._order.repeats
        for step in range(first_step, plan.last_step + 1):
            start, shares = step_slice(plan, step, len(self._order))
            a = start + sum(shares[: self._rank])
            b = a + shares[self._rank]
            if a < b:
                before = None if repeats is None else repeats[a:b].tolist()
                yield Draw(indices[a:b].tolist(), plan.epoch, before)


def cut(batch: Any, start: int, stop: int, *, size: int) -> Any:
    """Returns the samples from ``start`` to ``stop`` of a batch of ``size``.

    Whatever in it has ``size`` as its length is cut: tensors and lists, in tuples, mappings and
    dataclasses, nested as you like.

    Raises:
        DataError: Nothing in it has that length, so it cannot be cut.

    Example:
        >>> cut({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, 1, 3, size=4)
        {'x': tensor([1, 2]), 'name': ['b', 'c']}
    """
    done = [0]
    piece = _cut(batch, slice(start, stop), size, done)
    if not done[0]:
        raise DataError(
            f"a batch of type {type(batch).__name__} cannot be cut into pieces: it has no tensor "
            f"with its {size} samples as the first dimension."
        )
    return piece


def _cut(batch: Any, where: slice, size: int, done: list[int]) -> Any:
    def inside(value: Any) -> Any:
        return _cut(value, where, size, done)

    if isinstance(batch, torch.Tensor):
        if batch.ndim == 0 or len(batch) != size:
            return batch
        done[0] += 1
        return batch[where]
    if isinstance(batch, dict):
        piece = copy.copy(batch)
        piece.update({key: inside(value) for key, value in batch.items()})
        return piece
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inside, batch))
    if isinstance(batch, list) and len(batch) == size and not _is_columns(batch):
        done[0] += 1
        return batch[where]
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(inside, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        named = {f.name: inside(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **named)
    return batch


def _is_columns(batch: list[Any]) -> bool:
    """Whether a list with as many entries as there are samples holds columns, not samples."""
    tensors = [each for each in batch if isinstance(each, torch.Tensor)]
    return bool(tensors) and all(each.ndim and len(each) == len(batch) for each in tensors)
