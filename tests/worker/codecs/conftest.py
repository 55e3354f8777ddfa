"""Several ranks in one process: a thread for each, and a wire of barriers between them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hetkit.worker.codecs.bucket import Bucket

LIMIT_S = 60.0


class Hub:
    """Where the wires of one group meet."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.slots: list[torch.Tensor] = [torch.empty(0)] * world_size
        self.barrier = threading.Barrier(world_size, timeout=LIMIT_S)


class ThreadWire:
    """A rank's wire; counts what a ring would send for it."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.world_size, self.rank = hub.world_size, rank
        self.sent_bytes = 0.0
        self.largest_element_bytes = 0
        self._hub = hub

    def all_reduce(self, tensor: torch.Tensor) -> None:
        everyone = self._meet(tensor, 2)
        tensor.copy_(sum(everyone[1:], start=everyone[0].clone()))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        everyone = self._meet(input, 1)
        rank, world_size = self.rank, self.world_size
        output.copy_(torch.cat([each.view(-1).chunk(world_size)[rank] for each in everyone]))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        assert output.numel() == input.numel() * self.world_size
        output.copy_(torch.cat([each.view(-1) for each in self._meet(input, self.world_size)]))

    def _meet(self, tensor: torch.Tensor, wholes: float) -> list[torch.Tensor]:
        assert tensor.is_contiguous()
        share = (self.world_size - 1) / self.world_size
        self.sent_bytes += wholes * share * tensor.numel() * tensor.element_size()
        self._hub.slots[self.rank] = tensor.clone()
        self._hub.barrier.wait()
        everyone = list(self._hub.slots)
        self._hub.barrier.wait()
        return everyone


class Group:
    """Ranks with a codec each.

    Attributes:
        codecs: By rank.
        sent_bytes: What each rank sent in the last exchange.
    """

    def __init__(self, make: Callable[[], Any], world_size: int) -> None:
        self.codecs = [make() for _ in range(world_size)]
        self.sent_bytes: list[float] = []

    def sum(self, flats: list[torch.Tensor], shapes: Any = None) -> list[torch.Tensor]:
        """Returns each rank's bucket after the exchange; the given ones stay as they are."""
        hub = Hub(len(flats))
        wires = [ThreadWire(hub, rank) for rank in range(len(flats))]
        results = [flat.clone() for flat in flats]

        def exchange(rank: int) -> None:
            shaped = shapes or [("w", flats[rank].shape)]
            try:
                self.codecs[rank].exchange(Bucket.of(results[rank], shaped), wires[rank])
            except BaseException:
                hub.barrier.abort()
                raise

        with ThreadPoolExecutor(len(flats)) as pool:
            list(pool.map(exchange, range(len(flats))))
        self.sent_bytes = [wire.sent_bytes for wire in wires]
        return results

    def step(self, flats: list[torch.Tensor], shapes: Any = None) -> torch.Tensor:
        """Returns the sum that all ranks agreed on, bit by bit, and settles it if it is finite."""
        first, *others = self.sum(flats, shapes)
        for other in others:
            assert torch.equal(bits(other), bits(first)), "the ranks differ"
        reals = torch.view_as_real(first) if first.is_complex() else first
        for codec in self.codecs:
            codec.settle(bool(reals.isfinite().all()))
        return first


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


@pytest.fixture
def group() -> type[Group]:
    return Group
