"""The passes: the forward and backward passes of a step, whatever memory says to them.

Each micro-batch is a pass, and the last hands DDP's buckets over. A pass that runs out of memory
is shrunk: from then on the rank makes passes of at most half as many samples, beginning with the
very samples that did not fit (`hetkit.worker.out_of_memory` says which gradients they are still
needed for), and the peers wait in the exchange::

    rank 0   ██ 0…255 ██│ hands over ···· waits ···················│ optimizer
    rank 1   ██ 256…511 ✗ ██ 256…383 ██ ██ 384…511 ██│ hands over  │ optimizer

Where the model's layers look across the ranks that cannot be done: the peers would wait inside the
model. The error goes on, and training begins again from its last state, with the smaller passes.
"""

import gc
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hetkit.errors import LossError, WorkerError
from hetkit.plan import Plan
from hetkit.task import Task
from hetkit.worker.data import Samples, to_device
from hetkit.worker.emulation import DeviceClock
from hetkit.worker.exchange import Exchange
from hetkit.worker.loader import Loader
from hetkit.worker.loss import measure, require_finite
from hetkit.worker.memory import MemoryMeter
from hetkit.worker.meter import Meter
from hetkit.worker.objective import Objective
from hetkit.worker.order import EpochOrder, micro_batches
from hetkit.worker.out_of_memory import (
    Arrivals,
    Buffers,
    add_gradients,
    is_out_of_memory,
    let_go,
)
from hetkit.worker.precision import autocast
from hetkit.worker.totals import Totals


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a rank has to compute in a step.

    Args:
        plan: The plan in force.
        step: The step.
        pieces: Where the rank's micro-batches begin and end in the epoch's order.
        divisor: What the sum of the losses is divided by.
        scale: What the loss is multiplied by (the loss scale of fp16).
    """

    plan: Plan
    step: int
    pieces: list[tuple[int, int]]
    divisor: float
    scale: float


@dataclass(kw_only=True)
class _Pass:
    """A forward and backward pass over the samples from ``first`` to ``stop``, and how far it got.

    ``only`` are the parameters that its gradient is for (None: all, by way of their hooks);
    ``counts`` tells whether its loss is still to be counted; ``armed``, that DDP was told to
    expect the gradients of this step.
    """

    first: int
    stop: int
    hands_over: bool = False
    only: tuple[torch.Tensor, ...] | None = None
    counts: bool = True
    armed: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.first


class Passes:
    """Computes one rank's gradients, step by step.

    Args:
        task: What is trained.
        objective: The task's loss of the built model, on its device.
        samples: The training data.
        order: The order of its samples.
        rank: This rank.
        device: Where the model lives.
        meter: Stamps the parts of a step.
        memory: Tells what a pass takes.
        exchange: The gradient exchange; None for a single rank, which has nothing to exchange.
        clock: The emulated device's clock; None for a real device.
        counted: Whether the loss returns ``(mean, count)``.
        on_cap: Called when a pass has run out of memory: with the new largest micro-batch, what
            did not fit, and whether the step is lost.

    Attributes:
        loader: Fetches the micro-batches.
        cap: Samples of the largest pass that may be tried; None: as many as the plan says.
    """

    def __init__(
        self,
        task: Task,
        objective: Objective,
        samples: Samples,
        order: EpochOrder,
        *,
        rank: int,
        device: torch.device,
        meter: Meter,
        memory: MemoryMeter,
        exchange: Exchange | None,
        clock: DeviceClock | None,
        counted: bool,
        on_cap: Callable[[int, int, bool], None],
    ) -> None:
        pin = task.pin_memory and device.type == "cuda"
        self.loader = Loader(samples, task.num_workers, pin_memory=pin)
        self.cap: int | None = None
        self._objective = objective
        self._wrapped: Objective | DistributedDataParallel = objective
        self._order = order
        self._rank = rank
        self._device = device
        self._meter = meter
        self._memory = memory
        self._exchange = exchange
        self._clock = clock
        self._counted = counted
        self._on_cap = on_cap
        self._reduction = task.reduction
        self._statistics = objective.statistics
        model = objective.model
        self._arrivals = Arrivals([p for p in model.parameters() if p.requires_grad])
        self._buffers = Buffers(model)

    def wrap(self, bucket_bytes: int | None) -> None:
        """Has DDP cut the gradients into buckets of ``bucket_bytes`` (None: its own size)."""
        if self._exchange is None:
            return
        # The reducer before it must let go of the parameters before a new one takes them.
        self._wrapped = self._objective
        gc.collect()
        with warnings.catch_warnings():
            # The option's successor would share the buffers at once; the loop does that itself.
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            wrapped = DistributedDataParallel(
                self._objective,
                bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20,
                find_unused_parameters=self._objective.varying,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )
        self._exchange.attach(wrapped)
        self._wrapped = wrapped

    def run(self, work: StepWork) -> Totals:
        """Makes the step's passes; returns their sums.

        Raises:
            LossError: The loss is not a scalar, or not finite in the very first step.
            WorkerError: Not even one sample fits into the memory.
        """
        totals = Totals(self._device)
        if work.plan.local and not work.pieces:
            return totals
        shares = not work.plan.local
        ahead = deque(work.pieces or [(0, 0)])
        loaded = True
        while ahead:
            first, stop = ahead.popleft()
            each = _Pass(first=first, stop=stop, hands_over=shares and not ahead)
            fitted = self._try(each, work, totals, loaded=loaded)
            if not fitted:
                self._redo(each, work, totals)
                loaded = False  # what was fetched ahead has the old size
                ahead = deque(piece for each in ahead for piece in self._cut(*each))
        if self._exchange is not None and shares:
            self._meter.cut_at(self._exchange.cut)
        return totals

    def _try(self, each: _Pass, work: StepWork, totals: Totals, *, loaded: bool = False) -> bool:
        """Makes a pass; returns whether the memory sufficed."""
        self._arrivals.begin()
        if not self._across:
            self._buffers.keep()
        try:
            self._make(each, work, totals, loaded=loaded)
        except Exception as error:
            if not is_out_of_memory(error) or not each.size:
                raise
            self._shrink(each, error)
            if each.only is None and (each.armed or self._arrivals.any):
                each.only = self._arrivals.missing()
            let_go(error, self._device)
            self._buffers.restore()
            totals.shrunk = True
            return False
        return True

    @property
    def _across(self) -> bool:
        """Whether the other ranks wait for this one inside the model."""
        statistics = self._statistics
        return self._exchange is not None and statistics is not None and statistics.active

    def _shrink(self, each: _Pass, error: Exception) -> None:
        if each.size == 1:
            raise WorkerError(self._memory.nothing_fits(error)) from error
        exchange = self._exchange
        handed_over = exchange is not None and (exchange.complete or exchange.error is not None)
        lost = handed_over or self._across
        self.cap = each.size // 2
        self._on_cap(self.cap, each.size, lost)
        if lost:
            raise error

    def _redo(self, failed: _Pass, work: StepWork, totals: Totals) -> None:
        """Computes the samples of a failed pass in smaller ones, for what is still missing."""
        todo = deque(self._smaller(failed))
        while todo:
            each = todo.popleft()
            if not self._try(each, work, totals):
                todo.extendleft(reversed(self._smaller(each)))
        if failed.armed:
            self._complete(failed, work, totals)
        elif failed.hands_over and self._exchange is not None:
            # An empty pass hands over what the small ones have added up.
            self._make(_Pass(first=0, stop=0, hands_over=True), work, totals)

    def _smaller(self, failed: _Pass) -> list[_Pass]:
        if failed.only == ():
            return []
        return [
            _Pass(first=first, stop=stop, only=failed.only, counts=failed.counts)
            for first, stop in self._cut(failed.first, failed.stop)
        ]

    def _cut(self, first: int, stop: int) -> list[tuple[int, int]]:
        return micro_batches(first, stop - first, self.cap or stop - first)

    def _complete(self, failed: _Pass, work: StepWork, totals: Totals) -> None:
        """Has DDP hand over the rest of a pass that it had been told to expect."""
        if self._clock is not None:
            self._clock.begin_micro_batch(0, work.plan.amp[self._rank])
        if self._counted:
            totals.agree()
        with self._meter.computing():
            self._objective.rest(failed.only or ()).backward()  # type: ignore[no-untyped-call]

    def _make(self, each: _Pass, work: StepWork, totals: Totals, *, loaded: bool = False) -> None:
        precision = work.plan.amp[self._rank]
        batch = self._batch(each, loaded)
        self._memory.take(each.size)
        if self._clock is not None:
            self._clock.begin_micro_batch(each.size, precision)
        if self._statistics is not None:
            self._statistics.begin_micro_batch(empty=not each.size, loss_scale=work.scale)
        with self._meter.computing():
            loss = self._forward(each, batch, work, totals)
            del batch
            if each.hands_over and self._exchange is not None and self._counted:
                totals.agree()
            if each.only is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                add_gradients(loss, each.only)
        if each.hands_over and self._exchange is not None:
            self._require_all(loss, work.step)
        elif self._clock is not None:
            # With an exchange, the hook held the clock before it handed the last bucket over.
            self._clock.backward_done(1.0)
        if self._statistics is not None:
            self._statistics.end_micro_batch()
        totals.made(each.size)

    def _batch(self, each: _Pass, loaded: bool) -> Any:
        if not each.size:
            return None
        with self._meter.data():
            if loaded:
                batch = self.loader.next()
            else:
                batch = self.loader.fetch(self._order.draw(each.first, each.stop))
            return to_device(batch, self._device)

    def _forward(self, each: _Pass, batch: Any, work: StepWork, totals: Totals) -> torch.Tensor:
        module, quiet = self._module(each, work.plan)
        with quiet, autocast(work.plan.amp[self._rank], self._device):
            returned, visited = module(batch)
        each.armed = each.hands_over and self._exchange is not None
        if self._statistics is not None:
            self._statistics.end_forward()
        mean, count, counted = measure(returned, each.size, reduction=self._reduction)
        if each.size and counted != self._counted:
            raise LossError("the loss returns (mean, count) for some batches only: do so always.")
        if self._clock is not None:
            self._clock.forward_done()
        if count:
            # In float32: of a 16-bit loss, the gradient of the scale alone would overflow.
            wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
            loss: torch.Tensor = wide * (count / work.divisor * work.scale)
            if each.counts:
                totals.add(mean.detach(), count)
                each.counts = False
            if work.step == 0:
                require_finite(mean)
        else:  # the mean of nothing is often NaN, and 0 · NaN is NaN
            loss = self._objective.zero(mean)
        return loss if visited is None else loss + visited

    def _module(
        self, each: _Pass, plan: Plan
    ) -> tuple[Objective | DistributedDataParallel, AbstractContextManager[None]]:
        if plan.local or each.only is not None:
            return self._objective, nullcontext()
        if not each.hands_over and isinstance(self._wrapped, DistributedDataParallel):
            return self._wrapped, self._wrapped.no_sync()
        return self._wrapped, nullcontext()

    def _require_all(self, loss: torch.Tensor, step: int) -> None:
        if self._exchange is not None and not self._exchange.complete:
            raise LossError(
                f"on rank {self._rank} the loss of step {step} does not depend on "
                f"{', '.join(self._objective.missing(loss))}, which it did for the first samples: "
                "where the use of parameters varies, give Task(find_unused_parameters=True)."
            )
