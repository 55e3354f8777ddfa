"""The gradient exchange: one DDP comm hook for the model's whole life, which dispatches.

DDP hands each bucket over as soon as it is ready; the hook returns a future at once and one engine
thread does the rest, in hand-over order, on a process group of its own::

    autograd   ██ bucket 0 ready ██ bucket 1 ready ██│ waits for the futures │ optimizer
                    │                    │
    engine          └▶ encode·sum·decode └▶ encode·sum·decode

Why a thread: on gloo, chained futures crash or hang and blocking inside the hook costs the
overlap. Why an own group: DDP's group is used by the main thread at the same time. The hook *sums*:
each micro-batch's loss was already divided by the whole step's denominator.

Where a bucket travels as it is, the engine would only pass it on, and each hand from thread to
thread costs some tenths of a millisecond on busy cores: the hook starts that sum itself.
"""

import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from hetkit.errors import WorkerError
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.plain import Plain
from hetkit.worker.emulated_link import EmulatedLink
from hetkit.worker.guard import Guard
from hetkit.worker.precision import buckets_finite
from hetkit.worker.wire import GroupWire

_log = logging.getLogger(__name__)

Shapes = Sequence[tuple[str, Sequence[int]]]
"""Name and shape of the parameters in a flat buffer, in the order in which they lie there."""

_Job = tuple[Callable[[], torch.Tensor], "torch.futures.Future[torch.Tensor]"]


class Exchange:
    """The comm hook and its engine thread.

    Args:
        group: A process group that nothing else uses.
        link: The emulated link, or None.
        bucket_ready: Called in the hook with the share of the gradient that is ready by now
            (0 … 1]; an emulated device holds its clock there.

    Attributes:
        codec: How buckets travel; `hetkit.worker.switch` changes it, on all ranks at the same step.
        guard: Looks at the codec's results now and then.
        reading: What the guard found in this step, or None.
        world_size: Ranks.
        inverse_scale: Each bucket is multiplied by it before it travels (1 / loss scale).
        complete: Whether DDP has handed the step's last bucket over.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        link: EmulatedLink | None,
        codec: Codec,
        bucket_ready: Callable[[float], None] | None = None,
    ) -> None:
        self.codec = codec
        self.guard = Guard()
        self._plain = Plain()
        self.inverse_scale = 1.0
        self.error: BaseException | None = None
        self.world_size = group.size()
        self._wire = GroupWire(group, link)
        on_cards = dist.get_backend(group) == "nccl"  # which carries what lies on a card alone
        self._device = torch.device("cuda" if on_cards else "cpu")
        self._bucket_ready = bucket_ready
        self._elements = 0
        self._total_elements = 1
        self._names: dict[torch.Tensor, str] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="hetkit-exchange", daemon=True)
        self._thread.start()
        self.begin_step()

    def attach(self, model: DistributedDataParallel) -> None:
        """Registers the hook; PyTorch allows that once per DDP instance."""
        self._total_elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        model.register_comm_hook(self, _hook)

    def begin_step(self, step: int = 0) -> None:
        """Clears the account for ``step``."""
        self.guard.begin_step(step)
        self.reading: tuple[float, float] | None = None
        self.cut = time.monotonic()
        self._codec_spans: list[tuple[float, float]] = []
        self.bucket_bytes: list[int] = []
        self.wire_bytes = 0.0
        self._buckets: list[torch.Tensor] = []
        self._wire.collectives = []
        self._elements = 0
        self.complete = False

    @property
    def collectives(self) -> tuple[tuple[float, float], ...]:
        """``(start, end)`` of each collective of the step."""
        return tuple(self._wire.collectives)

    def codec_s(self) -> float:
        """Returns the engine's seconds after the cut that were not spent in a collective."""
        return sum(max(0.0, end - max(start, self.cut)) for start, end in self._codec_spans)

    def all_finite(self) -> bool:
        """Tells whether what the step's buckets hold is finite; call it when their sums are there.

        Equal on all ranks, since the sums are.
        """
        return buckets_finite(self._buckets)

    def settle(self, good: bool) -> None:
        """Ends an exchange, on all ranks alike: the codec keeps or drops what is pending of it.

        Args:
            good: Whether the sum is used; False where the step is skipped.
        """
        self.codec.settle(good)
        self.reading = self.guard.settle() or self.reading

    def close(self) -> None:
        """Ends the engine thread; it must have left gloo before the group is destroyed."""
        self._jobs.put(None)
        self._thread.join(timeout=10.0)

    def hand_over(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Takes a ready bucket; the future holds its sum over the ranks."""
        buffer = bucket.buffer()
        self._elements += buffer.numel()
        self.complete = bucket.is_last()
        if self._bucket_ready is not None:
            share = 1.0 if bucket.is_last() else self._elements / self._total_elements
            self._bucket_ready(min(1.0, share))
        if buffer.is_cuda and bucket.is_last():
            # The cut is when the device has computed, not when the host has queued its work.
            torch.cuda.synchronize(buffer.device)
        return self.submit(buffer, () if self.codec.as_it_is else self._shapes(bucket))

    def submit(self, buffer: torch.Tensor, shapes: Shapes) -> "torch.futures.Future[torch.Tensor]":
        """Takes a flat buffer; the future holds its sum over the ranks, in that very buffer.

        Args:
            buffer: The gradients of some parameters.
            shapes: Those parameters; what a codec keeps of them is kept by their names. A sum that
                travels as it is needs none.
        """
        self.cut = time.monotonic()
        self._buckets.append(buffer)
        bucket = Bucket.of(buffer, shapes or [("", buffer.shape)])
        if self._wire.immediate and self.codec.as_it_is and self.inverse_scale == 1.0:
            self._count(self.codec, bucket)
            return self._wire.start_all_reduce(buffer, self._note)
        return self._put(functools.partial(self._sum, buffer, bucket))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Waits for a few values of every rank and returns them, in rank order.

        The values travel in the engine's order, after what was handed over before. The calls of
        all ranks must match, in number and in the number of values.
        """
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        whole: list[list[float]]
        whole = self._put(functools.partial(self._wire.gather, mine)).wait().tolist()
        return whole

    def _put(self, work: Callable[[], torch.Tensor]) -> "torch.futures.Future[torch.Tensor]":
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._jobs.put((work, future))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            try:
                if self.error is not None:
                    raise WorkerError("an earlier exchange of this rank failed") from self.error
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - the future takes it to the main thread
                # The main thread is inside backward() and raises what the future holds.
                self._note(error)
                future.set_exception(error)  # type: ignore[arg-type]

    def _note(self, error: BaseException) -> None:
        self.error = self.error or error
        _log.debug("exchange failed", exc_info=error)

    def _sum(self, buffer: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        start, before = time.monotonic(), len(self._wire.collectives)
        if self.inverse_scale != 1.0:
            buffer.mul_(self.inverse_scale)
        # A sparse gradient names the rows that it has: it is small as it is.
        codec = self._plain if buffer.is_sparse else self.codec
        looks = self.guard.looks and not codec.as_it_is
        true = bucket.flat.clone() if looks else None
        codec.exchange(bucket, self._wire)
        self._count(codec, bucket)
        if true is not None:
            self._wire.all_reduce(true)
            self.wire_bytes += self._plain.wire_bytes(
                bucket.pieces, true.element_size(), self._wire.world_size
            )
            self.guard.compare(bucket.flat, true)
        edges = [start, *itertools.chain(*self._wire.collectives[before:]), time.monotonic()]
        self._codec_spans += zip(edges[::2], edges[1::2], strict=True)
        return buffer

    def _count(self, codec: Codec, bucket: Bucket) -> None:
        size = bucket.flat.element_size()
        self.bucket_bytes.append(bucket.flat.numel() * size)
        self.wire_bytes += codec.wire_bytes(bucket.pieces, size, self._wire.world_size)

    def _shapes(self, bucket: GradBucket) -> Shapes:
        # DDP regroups the parameters after the first step: ask each time what lies where.
        return [(self._names[parameter], parameter.shape) for parameter in bucket.parameters()]


def _hook(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return exchange.hand_over(bucket)
