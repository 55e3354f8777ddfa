"""The trial: what a codec and the link cost on this task's gradients, tried between two steps.

Run on all ranks at once by ``session.call``, so that cores which the ranks share are shared here as
they are in training. A codec encodes and decodes made-up gradients of the model's own shapes over a
wire that leads back to itself: what is timed is the codec alone. Then it exchanges over the link,
where each of its collectives is timed. The link also carries two sums, a small one and one as large
as the largest bucket, so that its latency can be told from its rate.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hetkit.devices.device import Device
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.exposure import Transfer, pack_buckets
from hetkit.planning.situation import CodecCost
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.emulated_link import link_of
from hetkit.worker.wire import GroupWire

REPEATS = 5
_SMALL_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one rank found.

    Args:
        costs: Of each codec, by its text.
        transfers: Of the link, as this rank saw it.
        spans: Of each codec, the seconds of its collectives, in order, exchange by exchange.
        bucket_bytes: Sizes of the buckets that were tried.
        shapes: The gradient's tensors in the order in which they are ready.
        element_bytes: Size of one element.
        fixed_bytes: Weights, buffers, gradients and optimizer state.
    """

    costs: dict[str, CodecCost]
    transfers: tuple[Transfer, ...]
    spans: dict[str, tuple[tuple[float, ...], ...]]
    bucket_bytes: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int
    fixed_bytes: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A function for ``session.call``; give it to all ranks.

    Args:
        compressions: Built-in codecs to try, by their text.
        devices: The ranks' devices, whose link is emulated where they are.
        bucket_bytes: Size of DDP's buckets; None: PyTorch's.
        with_link: Whether to try the link by itself too.
    """

    compressions: tuple[str, ...]
    devices: tuple[Device, ...]
    bucket_bytes: int | None
    with_link: bool

    def __call__(self, worker: Any) -> Findings:
        """Tries codecs and link."""
        gradients = [p for p in reversed(list(worker.model.parameters())) if p.requires_grad]
        buckets = _buckets(gradients, self.bucket_bytes)
        n = worker.world_size
        wire = self._wire() if n > 1 else None
        return Findings(
            costs={text: try_codec(text, buckets, n) for text in self.compressions},
            transfers=tuple(_try_link(wire, buckets)) if wire and self.with_link else (),
            spans={text: _exchange(text, buckets, wire) for text in self.compressions if wire},
            bucket_bytes=tuple(float(b.flat.numel() * b.flat.element_size()) for b in buckets),
            shapes=tuple(tuple(p.shape) for p in gradients),
            element_bytes=gradients[0].element_size(),
            fixed_bytes=_fixed_bytes(worker.model, worker.optimizer),
        )

    def _wire(self) -> GroupWire:
        group = dist.distributed_c10d._get_default_group()
        return GroupWire(group, link_of(self.devices, self.devices[0]))


def _try_link(wire: GroupWire, buckets: Sequence[Bucket]) -> Iterator[Transfer]:
    n = wire.world_size
    largest = max((bucket.flat for bucket in buckets), key=torch.Tensor.numel)
    for tensor in (largest[:_SMALL_ELEMENTS].clone(), largest.clone()):
        wire.all_reduce(torch.zeros_like(tensor[:1]))  # all ranks have come
        size_bytes = tensor.numel() * tensor.element_size()
        for _ in range(REPEATS):
            start = time.monotonic()
            wire.all_reduce(tensor)
            seconds, sent = time.monotonic() - start, ring_bytes(n, size_bytes)
            yield Transfer(hops=2 * (n - 1), sent_bytes=sent, seconds=seconds)


def _exchange(
    compression: str, buckets: Sequence[Bucket], wire: GroupWire
) -> tuple[tuple[float, ...], ...]:
    """Returns how long each collective of an exchange took here, exchange by exchange."""
    codec, spans = make_codec(compression), []
    for _ in range(1 + REPEATS):
        wire.collectives = []
        for bucket in buckets:
            codec.exchange(Bucket(bucket.flat.clone(), bucket.pieces), wire)
        codec.settle(True)
        spans.append(tuple(end - start for start, end in wire.collectives))
    return tuple(spans[1:])


class Echo:
    """A wire that leads back to the rank itself; it counts and excuses what it does.

    Attributes:
        halves: Collectives so far, an all-reduce counted as two.
        seconds: Spent in here.

    Example:
        >>> wire, came = Echo(2), torch.zeros(4)
        >>> wire.all_gather(came, torch.tensor([1.0, 2.0]))
        >>> came.tolist(), wire.halves
        ([1.0, 2.0, 1.0, 2.0], 1)
    """

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.halves = 0
        self.seconds = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor as it is."""
        self.halves += 2

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Takes the rank's own rows for the others'."""
        self._copy(output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Takes the rank's own result for the others'."""
        self._copy(output.view(self.world_size, -1), input.view(1, -1))

    def stamp(self, start: float) -> None:
        """Nothing is stamped."""

    def _copy(self, output: torch.Tensor, input: torch.Tensor) -> None:
        start = time.monotonic()
        output.copy_(input)
        self.halves += 1
        self.seconds += time.monotonic() - start


def try_codec(compression: str, buckets: Sequence[Bucket], world_size: int) -> CodecCost:
    """Returns what a codec costs on buckets; the first round, which allocates, does not count."""
    codec, times, wire = make_codec(compression), [], Echo(world_size)
    elements = sum(bucket.flat.numel() for bucket in buckets)
    for _ in range(1 + REPEATS):
        copies = [Bucket(bucket.flat.clone(), bucket.pieces) for bucket in buckets]
        wire, start = Echo(world_size), time.monotonic()
        for bucket in copies:
            codec.exchange(bucket, wire)
        if buckets[0].flat.is_cuda:
            torch.cuda.synchronize()
        times.append((time.monotonic() - start - wire.seconds) / elements)
        codec.settle(True)
    element_s = median(times[1:])
    scatter = 1.4826 * median(abs(each - element_s) for each in times[1:])
    sizes = [(b.pieces, b.flat.element_size()) for b in buckets]
    raw = sum(ring_bytes(world_size, b.flat.numel() * b.flat.element_size()) for b in buckets)
    sent = sum(codec.wire_bytes(pieces, size, world_size) for pieces, size in sizes)
    return CodecCost(
        element_s=element_s,
        element_error=scatter / element_s * math.sqrt(math.pi / (2 * REPEATS)),
        ring_share=sent / raw if raw else 1.0,
        half_rounds=max(1, round(wire.halves / len(buckets))),
    )


def _buckets(gradients: Sequence[torch.Tensor], bucket_bytes: int | None) -> list[Bucket]:
    """Returns made-up gradients as DDP would group them."""
    groups: list[list[torch.Tensor]] = [[]]
    sizes = iter(pack_buckets([p.numel() * p.element_size() for p in gradients], bucket_bytes))
    left = next(sizes)
    for parameter in gradients:
        if left <= 0:
            groups.append([])
            left = next(sizes)
        groups[-1].append(parameter)
        left -= parameter.numel() * parameter.element_size()
    return [_bucket(group, place) for place, group in enumerate(groups)]


def _bucket(group: Sequence[torch.Tensor], place: int) -> Bucket:
    draw = torch.Generator().manual_seed(place)
    size = sum(p.numel() for p in group)
    flat = torch.randn(size, generator=draw).to(group[0].device, group[0].dtype) * 1e-3
    return Bucket.of(flat, [(f"{place}.{at}", p.shape) for at, p in enumerate(group)])


def _fixed_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    state = [
        value
        for kept in optimizer.state.values()
        for value in kept.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [p for p in model.parameters() if p.requires_grad]
    tensors = [*model.parameters(), *model.buffers(), *gradients, *state]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
