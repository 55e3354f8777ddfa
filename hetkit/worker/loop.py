"""The loop: executes granted steps so that the split never changes the maths.

With N the step's denominator over all ranks and micro-batches, each micro-batch's backward runs on
(sum of its losses) / N̂, the exchange *sums*, and the sum is multiplied by N̂ / N::

    gradient = Σ_ranks Σ_micro ∇(mean · count) / N        for every split, exactly

N̂ is the planned number of samples; N differs from it only when the loss counts something else
(tokens, valid pixels), and is then agreed by one tiny all-reduce beside the last backward. For a
task with ``reduction="sum"`` nothing is divided.
"""

import gc
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hetkit.errors import LossError
from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.task import Task
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.data import Samples, to_device
from hetkit.worker.emulation import DeviceClock
from hetkit.worker.exchange import Exchange
from hetkit.worker.group import is_peer_loss
from hetkit.worker.loader import Loader
from hetkit.worker.loss import measure, require_finite
from hetkit.worker.memory import MemoryMeter
from hetkit.worker.meter import Meter
from hetkit.worker.objective import Objective
from hetkit.worker.order import EpochOrder, step_slice
from hetkit.worker.precision import autocast
from hetkit.worker.randomness import seed_step
from hetkit.worker.update import Update


class TrainingLoop:
    """One rank's training: executes the steps that it is told to, one by one.

    Args:
        task: What is trained.
        objective: The task's loss of the built model, on its device.
        samples: The training data.
        rank: This rank.
        seed: The session's seed.
        device: Where the model lives.
        meter: Takes the rows of the finished steps.
        memory: Reads the memory.
        exchange: The gradient exchange; None for a single rank, which has nothing to exchange.
        clock: The emulated device's clock; None for a real device.
        counted: Whether the loss returns ``(mean, count)``.
    """

    def __init__(
        self,
        task: Task,
        objective: Objective,
        samples: Samples,
        *,
        rank: int,
        seed: int,
        device: torch.device,
        meter: Meter,
        memory: MemoryMeter,
        exchange: Exchange | None,
        clock: DeviceClock | None,
        counted: bool = False,
    ) -> None:
        self.model = objective.model
        self.step = 0
        self.epoch = 0
        self.epoch_first_step = 0
        self.plan: Plan | None = None
        self._rank = rank
        self._seed = seed
        self._device = device
        self._meter = meter
        self._memory = memory
        self._exchange = exchange
        self._clock = clock
        self._counted = counted
        self._reduction = task.reduction
        self._objective = objective
        self._statistics = objective.statistics
        self._wrapped: Objective | DistributedDataParallel = objective
        pin = task.pin_memory and device.type == "cuda"
        self._loader = Loader(samples, task.num_workers, pin_memory=pin)
        self.order = EpochOrder(
            samples,
            task.sampler,
            seed=seed,
            epoch_samples=task.epoch_samples,
            rank=rank,
            device=None if exchange is None else device,
            in_rounds=self._statistics is not None,
        )
        self.update = Update(task, self.model, exchange, rank)

    def apply(self, plan: Plan) -> None:
        """Makes ``plan`` the one in force; its first step must be the next one."""
        before = self.plan
        self.plan = plan
        self.epoch = plan.epoch
        self.epoch_first_step = plan.epoch_first_step
        if self._exchange is not None:
            if before is None or before.compression != plan.compression:
                self._exchange.codec = make_codec(plan.compression)
            if before is None or before.bucket_bytes != plan.bucket_bytes:
                self._wrap(self._exchange, plan.bucket_bytes)
        if self._device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = plan.tf32
            torch.backends.cudnn.allow_tf32 = plan.tf32
        if self._statistics is not None:
            self._statistics.active = not plan.local
        self.update.apply(plan)
        self._loader.start(self.order.draws(plan, self._rank))

    def run_step(self) -> None:
        """Executes the next step and counts it.

        Raises:
            LossError: The loss is not a scalar, or not finite in the very first step.
        """
        plan = self._current_plan()
        self._meter.begin_step()
        seed_step(self._seed, self.step, self._rank)
        if self._clock is not None:
            self._clock.begin_step(self.step)
        if self._exchange is not None:
            self._exchange.begin_step()
            # With local steps the parameters' changes travel, not gradients.
            self._exchange.inverse_scale = 1.0 if plan.local else 1.0 / self.update.scale(plan)
        start, shares = step_slice(plan, self.step, len(self.order))
        memory = self._memory.read(min(plan.micro_batches[self._rank], shares[self._rank] or 1))
        sizes = [stop - first for first, stop in self.order.pieces(plan, start, shares, self._rank)]
        samples = sum(shares)
        planned = shares[self._rank] if plan.local else samples
        # A rank on its own stands in for all: of a sum, its part is scaled up to the whole.
        divisor = planned / samples if self._reduction == "sum" else planned
        totals = self._forward_backward(plan, sizes, divisor)
        finite = self._optimize(plan, totals, planned=planned, samples=samples)
        exchange = self._exchange
        stamps = self._meter.end_step(
            exchange.collectives if exchange else (),
            exchange.codec_s() if exchange else 0.0,
            self._statistics.take_waited_s() if self._statistics else 0.0,
        )
        self._meter.add(
            StepRow(
                step=self.step,
                epoch=plan.epoch,
                batch=shares[self._rank],
                micro_steps=sum(size > 0 for size in sizes),
                stamps=stamps,
                loss_sum=totals.loss_sum(),
                count=totals.count,
                wire_bytes=exchange.wire_bytes if exchange else 0.0,
                bucket_bytes=tuple(exchange.bucket_bytes) if exchange else (),
                memory_bytes=memory.used_bytes,
                memory_peak_bytes=memory.peak_bytes,
                skipped=not finite,
                loss_scale=self.update.loss_scale.scale if "fp16" in plan.amp else None,
                lr=self.update.lr,
                real_s=self._clock.real_s if self._clock else None,
            )
        )
        self.step += 1

    def flush(self) -> None:
        """Sends the account of the finished steps."""
        self._meter.flush()

    def end_epoch(self) -> None:
        """Steps the scheduler and shares the busiest rank's buffers, so that all stand alike."""
        plan = self._current_plan()
        busiest = plan.batches.index(max(plan.batches))
        self.update.end_epoch(plan, busiest)
        if self._exchange is not None:
            self._share_buffers(busiest)
        self.epoch += 1
        self.epoch_first_step = self.step

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps. Randomness is seeded per step, so it needs no state."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "epoch_first_step": self.epoch_first_step,
            "model": self.model.state_dict(),
            **self.update.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint's state."""
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.epoch_first_step = state["epoch_first_step"]
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)

    @property
    def exchange_failed(self) -> bool:
        """Whether the exchange failed because another rank is gone or has given up."""
        error = self._exchange.error if self._exchange is not None else None
        return error is not None and is_peer_loss(error)

    @property
    def outpaced(self) -> bool:
        """Whether this machine computes slower than the device that it emulates."""
        return self._clock is not None and self._clock.outpaced

    def close(self) -> None:
        """Ends the loader's processes and the exchange's thread."""
        self._loader.close()
        if self._exchange is not None:
            self._exchange.close()

    def _current_plan(self) -> Plan:
        if self.plan is None:
            raise RuntimeError("a step was granted before any plan was set")
        return self.plan

    def _share_buffers(self, source: int) -> None:
        for buffer in self.model.buffers():
            whole = buffer.contiguous()  # the buffer itself, or a copy of one that has gaps
            dist.broadcast(whole, src=source)
            if whole is not buffer:
                buffer.copy_(whole)

    def _wrap(self, exchange: Exchange, bucket_bytes: int | None) -> None:
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
        exchange.attach(wrapped)
        self._wrapped = wrapped

    def _forward_backward(self, plan: Plan, sizes: list[int], divisor: float) -> "_Totals":
        totals = _Totals(self._device)
        if plan.local and not sizes:
            return totals
        for place, size in enumerate(sizes or [0]):
            with self._meter.data():
                batch = to_device(self._loader.next(), self._device) if size else None
            last = place == max(0, len(sizes) - 1)
            with nullcontext() if last or plan.local else self._accumulate():
                self._micro_batch(plan, batch, size, totals, divisor, last=last)
        if self._exchange is not None and not plan.local:
            self._meter.cut_at(self._exchange.cut)
        return totals

    def _accumulate(self) -> AbstractContextManager[None]:
        if isinstance(self._wrapped, DistributedDataParallel):
            return self._wrapped.no_sync()
        return nullcontext()

    def _micro_batch(
        self, plan: Plan, batch: Any, size: int, totals: "_Totals", divisor: float, *, last: bool
    ) -> None:
        precision, scale = plan.amp[self._rank], self.update.scale(plan)
        if self._clock is not None:
            self._clock.begin_micro_batch(size, precision)
        if self._statistics is not None:
            self._statistics.begin_micro_batch(empty=not size, loss_scale=scale)
        with autocast(precision, self._device):
            returned, anchor = (self._objective if plan.local else self._wrapped)(batch)
        if self._statistics is not None:
            self._statistics.end_forward()
        mean, count, counted = measure(returned, size, reduction=self._reduction)
        if size and counted != self._counted:
            raise LossError("the loss returns (mean, count) for some batches only: do so always.")
        if self._clock is not None:
            self._clock.forward_done()
        if count:
            # In float32: of a 16-bit loss, the gradient of the scale alone would overflow.
            wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
            loss = wide * (count / divisor * scale)
            totals.add(mean.detach(), count)
            if self.step == 0:
                require_finite(mean)
        else:  # the mean of nothing is often NaN, and 0 · NaN is NaN
            loss = self._objective.zero(mean)
        if anchor is not None:
            loss = loss + anchor
        exchanges = last and self._exchange is not None and not plan.local
        if exchanges and self._counted:
            totals.agree()
        loss.backward()
        if exchanges:
            self._require_all(loss)
        elif self._clock is not None:
            # With an exchange, the hook held the clock before it handed the last bucket over.
            self._clock.backward_done(1.0)
        if self._statistics is not None:
            self._statistics.end_micro_batch()

    def _require_all(self, loss: torch.Tensor) -> None:
        if self._exchange is not None and not self._exchange.complete:
            raise LossError(
                f"on rank {self._rank} the loss of step {self.step} does not depend on "
                f"{', '.join(self._objective.missing(loss))}, which it did for the first samples: "
                "where the use of parameters varies, give Task(find_unused_parameters=True)."
            )

    def _optimize(self, plan: Plan, totals: "_Totals", *, planned: int, samples: int) -> bool:
        update = self.update
        if not plan.local:
            with self._meter.optimizer():
                count = totals.agreed_count() if self._counted else planned
                return update.step(plan, planned=planned, count=count)
        with self._meter.optimizer():
            finite = update.step_alone(plan, samples=samples, planned=planned, count=totals.count)
        if plan.next_sync(self.step) == self.step:
            ranks = update.exchange_changes(plan)
            with self._meter.optimizer():
                update.synchronise(plan, ranks)
        return finite


class _Totals:
    """A step's sums on this rank, and the denominator that all ranks agree on."""

    def __init__(self, device: torch.device) -> None:
        self._parts: list[tuple[torch.Tensor, float]] = []
        self._device = device
        self.count = 0.0
        self._shared: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, mean: torch.Tensor, count: float) -> None:
        """Adds a micro-batch; its mean stays on its device, so that nothing waits for it."""
        self._parts.append((mean, count))
        self.count += count

    def loss_sum(self) -> float:
        """Returns the sum of the losses; call it when the step is over."""
        return sum(float(mean) * count for mean, count in self._parts)

    def agree(self) -> None:
        """Starts summing the counts over the ranks, beside the last backward."""
        self._shared = torch.tensor([self.count], dtype=torch.float64, device=self._device)
        self._work = dist.all_reduce(self._shared, async_op=True)

    def agreed_count(self) -> float:
        """Returns the step's denominator over all ranks."""
        if self._work is None or self._shared is None:
            return self.count
        self._work.wait()
        return float(self._shared.item())
