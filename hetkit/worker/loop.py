"""The loop: executes granted steps so that the split never changes the maths.

With N the step's denominator over all ranks and micro-batches, each micro-batch's backward runs on
(sum of its losses) / N̂, the exchange *sums*, and the sum is multiplied by N̂ / N::

    gradient = Σ_ranks Σ_micro ∇(mean · count) / N        for every split, exactly

N̂ is the planned number of samples; N differs from it only when the loss counts something else
(tokens, valid pixels), and is then agreed by one tiny all-reduce beside the last backward. For a
task with ``reduction="sum"`` nothing is divided.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.task import Task
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.data import Samples
from hetkit.worker.emulation import DeviceClock
from hetkit.worker.exchange import Exchange
from hetkit.worker.group import is_peer_loss
from hetkit.worker.memory import MemoryMeter
from hetkit.worker.meter import Meter
from hetkit.worker.objective import Objective
from hetkit.worker.order import EpochOrder, step_slice
from hetkit.worker.passes import Passes, StepWork
from hetkit.worker.randomness import seed_step
from hetkit.worker.switch import CodecSwitch
from hetkit.worker.totals import Totals
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
        switch: Changes the exchange's codec; None for a single rank.
        clock: The emulated device's clock; None for a real device.
        counted: Whether the loss returns ``(mean, count)``.
        on_cap: Called when less fits into the memory than was planned: with the samples of the
            largest micro-batch, what did not fit (None: it follows from measured peaks), and
            whether the step is lost.
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
        switch: CodecSwitch | None,
        clock: DeviceClock | None,
        counted: bool = False,
        on_cap: Callable[[int, int | None, bool], None] = lambda *_: None,
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
        self._switch = switch
        self._clock = clock
        self._counted = counted
        self._reduction = task.reduction
        self._on_cap = on_cap
        self._told_cap: int | None = None
        self._statistics = objective.statistics
        self.order = EpochOrder(
            samples,
            task.sampler,
            seed=seed,
            epoch_samples=task.epoch_samples,
            rank=rank,
            device=None if exchange is None else device,
            in_rounds=self._statistics is not None,
        )
        self._passes = Passes(
            task,
            objective,
            samples,
            self.order,
            rank=rank,
            device=device,
            meter=meter,
            memory=memory,
            exchange=exchange,
            clock=clock,
            counted=counted,
            on_cap=on_cap,
        )
        self.update = Update(task, self.model, exchange, rank)

    def apply(self, plan: Plan) -> None:
        """Makes ``plan`` the one in force; its first step must be the next one."""
        before = self.plan
        self.plan = plan
        self.epoch = plan.epoch
        self.epoch_first_step = plan.epoch_first_step
        if self._switch is not None:
            self._switch.apply(plan, self.step, [self.update.optimizer])
        rewrap = before is None or before.bucket_bytes != plan.bucket_bytes
        if rewrap:
            self._passes.wrap(plan.bucket_bytes)
        if self._device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = plan.tf32
            torch.backends.cudnn.allow_tf32 = plan.tf32
        if self._statistics is not None:
            self._statistics.active = not plan.local
        self.update.apply(plan)
        self._keep_to_cap()
        self._passes.loader.start(self.order.draws(self._current_plan(), self._rank))

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
            self._exchange.begin_step(self.step)
            # With local steps the parameters' changes travel, not gradients.
            self._exchange.inverse_scale = 1.0 if plan.local else 1.0 / self.update.scale(plan)
        start, shares = step_slice(plan, self.step, len(self.order))
        samples = sum(shares)
        planned = shares[self._rank] if plan.local else samples
        # A rank on its own stands in for all: of a sum, its part is scaled up to the whole.
        totals = self._passes.run(
            StepWork(
                plan=plan,
                step=self.step,
                pieces=self.order.pieces(plan, start, shares, self._rank),
                divisor=planned / samples if self._reduction == "sum" else planned,
                scale=self.update.scale(plan),
            )
        )
        finite = self._optimize(plan, totals, planned=planned, samples=samples)
        if self._switch is not None:
            self._switch.look()
        exchange = self._exchange
        memory = self._memory.read(totals.largest or 1, whole=not totals.shrunk)
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
                micro_steps=totals.passes,
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
                guard_cosine=exchange.reading[0] if exchange and exchange.reading else None,
                guard_error=exchange.reading[1] if exchange and exchange.reading else None,
            )
        )
        self.step += 1
        self._mind_memory(totals)

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
        """Returns what a checkpoint keeps: call it on all ranks, at the same step.

        Randomness is seeded per step, so it needs no state. What differs between ranks is in what
        rank 0 returns.
        """
        return {
            "step": self.step,
            "epoch": self.epoch,
            "epoch_first_step": self.epoch_first_step,
            "model": self.model.state_dict(),
            "codec": self._switch.state_dict() if self._switch else None,
            **self.update.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint's state."""
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.epoch_first_step = state["epoch_first_step"]
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)
        if self._switch is not None:
            self._switch.load_state_dict(state.get("codec"))

    def take_notices(self) -> list[str]:
        """Returns what a person should know of the exchange, once."""
        return self._switch.take_notices() if self._switch else []

    @property
    def codec(self) -> Codec | None:
        """How gradients travel; None for a single rank."""
        return self._exchange.codec if self._exchange else None

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
        self._passes.loader.close()
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

    def _mind_memory(self, totals: Totals) -> None:
        """After a step: keeps to what turned out to fit, and tells what the peaks promise."""
        plan = self._current_plan()
        if totals.shrunk:
            self._keep_to_cap()
            if self.step <= plan.last_step:
                rest = replace(self._current_plan(), first_step=self.step)
                self._passes.loader.start(self.order.draws(rest, self._rank))
        promised = self._memory.largest_fit()
        if promised is not None and _differ(promised, self._told_cap, plan.global_batch):
            self._told_cap = promised
            self._on_cap(promised, None, False)

    def _keep_to_cap(self) -> None:
        """Lowers this rank's micro-batch in the plan where its memory has shown to hold less."""
        plan, cap = self._current_plan(), self._passes.cap
        if cap is not None and plan.micro_batches[self._rank] > cap:
            sizes = list(plan.micro_batches)
            sizes[self._rank] = cap
            self.plan = replace(plan, micro_batches=tuple(sizes))

    def _optimize(self, plan: Plan, totals: Totals, *, planned: int, samples: int) -> bool:
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


def _differ(cap: int, told: int | None, global_batch: int) -> bool:
    """Whether a cap is worth telling: it binds, and is not about what was told before."""
    if told is None:
        return cap < global_batch
    return not 0.9 * told <= cap <= 1.1 * told
