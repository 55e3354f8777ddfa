"""A step of an own loop: backward passes that accumulate, then each optimizer's exchange and step.

::

    for batch in worker.batches(…):    prepare   the step was granted; fetch its samples
        with worker.step():            begin     autocast
            worker.backward(…)                   ∇ · count / N̂  adds to the gradients
            (optimizer.step())                   meet · sum over the ranks · check · clip · update
                                       finish    the same for every optimizer, if not yet done

The exchange of an optimizer's gradients begins when it steps: nothing overlaps with the backward
pass, since only the user's code knows which backward is the last. A `hetkit.Task` overlaps.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from hetkit.errors import LossError, TaskError
from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.worker.exchange import Exchange
from hetkit.worker.loss import measure, require_finite
from hetkit.worker.memory import MemoryMeter
from hetkit.worker.meter import Meter
from hetkit.worker.order import micro_batches
from hetkit.worker.own.account import Account
from hetkit.worker.own.clock import OwnClock
from hetkit.worker.own.meeting import Meeting
from hetkit.worker.own.update import Moment, Updates
from hetkit.worker.precision import LossScale, autocast
from hetkit.worker.randomness import seed_step
from hetkit.worker.switch import CodecSwitch


class OwnStep:
    """Executes the steps of one rank's own loop.

    Args:
        rank: This rank.
        device: Where the models live.
        meter: Takes the rows of the finished steps.
        memory: Reads the memory.
        exchange: The gradient exchange; None for a single rank.
        switch: Changes its codec; None likewise.
        clock: The device's clock.

    Attributes:
        meeting: Where the ranks find out that they are not doing the same.
        updates: The optimizers.
        loss_scale: What fp16 ranks multiply their loss by; the same on all ranks.
        piece: Samples of the backward passes to come.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        meter: Meter,
        memory: MemoryMeter,
        exchange: Exchange | None,
        switch: CodecSwitch | None,
        clock: OwnClock,
    ) -> None:
        self.meeting = Meeting(exchange, rank)
        self.updates = Updates(exchange, self.meeting, meter, clock)
        self.loss_scale = LossScale()
        self.piece = 0
        self.meter = meter
        self._rank = rank
        self._device = device
        self._memory = memory
        self._exchange = exchange
        self._switch = switch
        self._clock = clock
        self._moment: Moment | None = None
        self._casting = ExitStack()

    def prepare(self, plan: Plan, step: int, *, share: int, planned: int) -> None:
        """Begins the account of a step, with its data.

        Args:
            plan: The plan in force.
            step: The step.
            share: The rank's samples.
            planned: All ranks' samples.
        """
        fp16 = plan.amp[self._rank] == "fp16"
        self.meter.begin_step()
        self._moment = Moment(
            plan=plan,
            step=step,
            share=share,
            planned=planned,
            scale=self.loss_scale.scale if fp16 else 1.0,
            account=Account(share),
        )
        self._moment.account.resume()
        if self._exchange is not None:
            self._exchange.begin_step(step)
            self._exchange.inverse_scale = 1.0 / self._moment.scale

    @property
    def waits(self) -> bool:
        """Whether a step was prepared and is not done yet."""
        return self._moment is not None

    def begin(self, seed: int) -> None:
        """Begins the step's computing; ``seed`` is the session's."""
        now = self._moment
        if now is None or self.updates.moment is not None:
            raise TaskError("each batch of worker.batches() takes one `with worker.step():`.")
        seed_step(seed, now.step, self._rank)
        self.piece = now.share
        self.updates.begin(now)
        self._clock.begin_step(now.step)
        self._casting.enter_context(autocast(now.plan.amp[self._rank], self._device))

    def backward(self, loss: Any, count: Any, of: str, retain_graph: bool) -> None:
        """Adds the loss's gradient, weighted by ``count``."""
        now = self.updates.moment
        if now is None:
            raise TaskError("worker.backward() belongs inside `with worker.step():`.")
        mean, count, _ = measure((loss, count), self.piece)
        for gradients in self.updates.gradients:
            gradients.enter(of)
            gradients.count(count, of=of, share=now.share)
        if count:
            _check(mean, first=now.step == 0)
            with torch.autocast(self._device.type, enabled=False):
                (mean * (count / now.planned * now.scale)).backward(retain_graph=retain_graph)
            now.account.add(mean.detach(), count, of=of, piece=self.piece)
        self._clock.end_pass(self.piece if count else 0, now.plan.amp[self._rank])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yields where the pieces of the plan's micro-batch begin and end, one after the other."""
        now = self.updates.moment
        if now is None:
            raise TaskError("worker.micro_batches() belongs inside `with worker.step():`.")
        places = micro_batches(0, now.share, now.plan.micro_batches[self._rank])
        now.account.pieces = max(now.account.pieces, len(places))
        for start, stop in places:
            self.piece = stop - start
            yield start, stop
        self.piece = now.share

    def abandon(self) -> None:
        """The user's code has raised in the middle of the step."""
        self._casting.close()

    def finish(self) -> None:
        """Has the optimizers step, and writes the step's row."""
        now, exchange = self._moment, self._exchange
        if now is None:
            raise TaskError("worker.step() was left twice.")
        self._casting.close()
        self.updates.finish()
        self._moment = None
        if self._switch is not None:
            self._switch.look()
        if "fp16" in now.plan.amp and self.updates.updated:
            self.loss_scale.update(overflow=self.updates.overflow)
        memory = self._memory.read(max(1, now.account.largest_piece))
        stamps = now.account.stamped(self.meter.end_step(*_times(exchange)))
        loss_sum, count = now.account.loss()
        self.meter.add(
            StepRow(
                step=now.step,
                epoch=now.plan.epoch,
                batch=now.share,
                micro_steps=now.account.pieces,
                stamps=stamps,
                loss_sum=loss_sum,
                count=count,
                wire_bytes=exchange.wire_bytes if exchange else 0.0,
                bucket_bytes=tuple(exchange.bucket_bytes) if exchange else (),
                memory_bytes=memory.used_bytes,
                memory_peak_bytes=memory.peak_bytes,
                skipped=self.updates.overflow,
                loss_scale=self.loss_scale.scale if "fp16" in now.plan.amp else None,
                lr=self.updates.lr,
                real_s=self._clock.real_s,
                guard_cosine=exchange.reading[0] if exchange and exchange.reading else None,
                guard_error=exchange.reading[1] if exchange and exchange.reading else None,
            )
        )


def _times(exchange: Exchange | None) -> tuple[tuple[tuple[float, float], ...], float]:
    """Returns the step's collectives and the engine's other seconds; nothing was overlapped."""
    if exchange is None:
        return (), 0.0
    exchange.cut = 0.0
    return exchange.collectives, exchange.codec_s()


def _check(mean: Any, *, first: bool) -> None:
    if not isinstance(mean, torch.Tensor) or not mean.requires_grad:
        raise LossError("the loss has no gradient: give a tensor computed from a wrapped model.")
    if first:
        require_finite(mean)
