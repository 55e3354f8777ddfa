"""The update of an own loop: before an optimizer steps, its gradients are summed over the ranks."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hetkit.errors import TaskError
from hetkit.plan import Plan
from hetkit.worker.exchange import Exchange
from hetkit.worker.meter import Meter
from hetkit.worker.own.account import Account
from hetkit.worker.own.clock import OwnClock
from hetkit.worker.own.gradients import Gradients, fill, sum_over_ranks
from hetkit.worker.own.meeting import Act, Meeting
from hetkit.worker.precision import all_finite
from hetkit.worker.rates import batch_rule

_IDLE = -1.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The step being executed.

    Args:
        plan: The plan in force.
        step: The step.
        share: The rank's samples.
        planned: All ranks' samples.
        scale: What the rank's losses are multiplied by.
        account: Takes the step's times.
    """

    plan: Plan
    step: int
    share: int
    planned: int
    scale: float
    account: Account


class Updates:
    """Has optimizers exchange their gradients, then check, clip and step as one process would.

    The optimizers stay the user's own objects, so schedulers and checkpoints take them as they
    are: what has to happen before and after their `step` happens in PyTorch's own hooks. A step to
    be skipped (a gradient is not finite) takes the gradients away, and optimizers pass over
    parameters without one.

    Args:
        exchange: The gradient exchange; None for a single rank.
        meeting: Where the ranks find out that they are not doing the same.
        meter: Takes the optimizers' seconds.
        clock: The device's clock.

    Attributes:
        moment: The step being executed; None between steps.
        overflow: Whether an optimizer's step was skipped in this step.
        updated: Whether one was asked to step in this step.
        first_batch: The global batch of the training's first step, which a rule is relative to.
        lr: The first group's rate of the first optimizer, in its latest step.
    """

    def __init__(
        self, exchange: Exchange | None, meeting: Meeting, meter: Meter, clock: OwnClock
    ) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.gradients: list[Gradients] = []
        self.moment: Moment | None = None
        self.overflow = self.updated = False
        self.first_batch: int | None = None
        self.lr: float | None = None
        self._exchange = exchange
        self._meeting = meeting
        self._meter = meter
        self._clock = clock
        self._by_hand = self._finishing = False
        self._undo = ExitStack()

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes an optimizer in.

        Raises:
            TaskError: It is none, or one of its parameters belongs to another.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TaskError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer.")
        gradients = Gradients(optimizer)
        taken = {parameter for other in self.gradients for parameter in other.parameters}
        if not taken.isdisjoint(gradients.parameters):
            raise TaskError("a parameter belongs to two optimizers: leave it to one of them.")
        number = len(self.optimizers)
        self.optimizers.append(optimizer)
        self.gradients.append(gradients)

        def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if arguments[1:] or named:
                raise TaskError("optimizer.step() takes no closure here: call worker.backward().")
            self._before(number)

        def after(*_: Any) -> None:
            self._after(number)

        def zero_grad(set_to_none: bool = True) -> None:
            gradients.clear()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def begin(self, moment: Moment) -> None:
        """Begins a step."""
        self.moment = moment
        self.overflow = self.updated = False
        self.first_batch = self.first_batch or moment.plan.global_batch

    def finish(self) -> None:
        """Steps every optimizer, unless the user's code has ever done so by itself."""
        if not self._by_hand:
            self._finishing = True
            for optimizer in self.optimizers:
                optimizer.step()
            self._finishing = False
        self.moment = None

    def _before(self, number: int) -> None:
        now = self.moment
        if now is None:
            raise TaskError("optimizer.step() belongs inside `with worker.step():`.")
        self._by_hand = self._by_hand or not self._finishing
        self.updated = True
        now.account.interrupt()
        self._undo.enter_context(torch.autocast(_kind(self.optimizers[number]), enabled=False))
        with torch.no_grad():
            gradients = self._gather(now, number)
            if self._exchange is not None:
                named = self.gradients[number].named(number)
                sum_over_ranks(self._exchange, named, now.plan.bucket_bytes)
            elif now.scale != 1.0 and gradients:
                torch._foreach_mul_(gradients, 1.0 / now.scale)
            self._undo.enter_context(self._meter.optimizer())
            finite = all_finite(gradients)
            if self._exchange is not None:
                self._exchange.settle(finite)
            if not finite:
                self.overflow = True
                self.gradients[number].clear()
            elif now.plan.clip_norm is not None:
                parameters = self.gradients[number].parameters
                torch.nn.utils.clip_grad_norm_(parameters, now.plan.clip_norm)
        self._set_rate(now.plan, number)

    def _after(self, number: int) -> None:
        self._undo.close()
        self.gradients[number].clear()
        torch.clear_autocast_cache()  # it may hold 16-bit copies of the weights as they were
        if self.moment is not None:
            self.moment.account.resume()
        self._clock.begin_pass()

    def _gather(self, now: Moment, number: int) -> list[torch.Tensor]:
        """Returns the gradients to sum: the same parameters' on all ranks."""
        mine = self.gradients[number]
        passes = mine.passes if now.share else _IDLE
        facts = self._meeting.meet(
            now.step, Act.UPDATE, number, passes, mine.names, mine.missing, self._clock.fact
        )
        precision = now.plan.amp[self._meeting.rank]
        now.account.resume()
        self._clock.agree([each[3] for each in facts], precision)
        now.account.interrupt()
        _check_passes([each[0] for each in facts], now)
        if len({each[1] for each in facts}) > 1:
            raise TaskError(
                f"in step {now.step} the ranks counted different things: rank "
                f"{self._meeting.rank} has {sorted(mine.counts) or 'samples only'}. Call "
                "worker.backward(loss, count=0, of=…) also where there is nothing to count."
            )
        names = sorted(mine.counts)
        totals = self._meeting.totals([mine.counts[name] for name in names])
        mine.merge(dict(zip(names, totals, strict=True)), planned=now.planned)
        parameters = mine.parameters
        present = [1.0] * len(parameters)
        if any(each[2] for each in facts):
            present = self._meeting.totals([float(p.grad is not None) for p in parameters])
        return fill(parameters, [ranks > 0 for ranks in present])

    def _set_rate(self, plan: Plan, number: int) -> None:
        """Sets the rate for this step alone, so that schedulers see only the loop's own."""
        groups = self.optimizers[number].param_groups
        ratio = plan.global_batch / (self.first_batch or plan.global_batch)
        factor = (plan.lr_factor or 1.0) * (batch_rule(plan.lr_rule, ratio) or 1.0)
        for group in groups:
            own = group["lr"]
            self._undo.callback(group.__setitem__, "lr", own)
            group["lr"] = plan.lr if plan.lr is not None else own * factor
        if number == 0:
            self.lr = float(groups[0]["lr"])


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return str(optimizer.param_groups[0]["params"][0].device.type)


def _check_passes(passes: list[float], now: Moment) -> None:
    """Every sample counts as often as every other, on all ranks: else the mean is another's.

    Raises:
        TaskError: It does not.
    """
    counted = {rank: each for rank, each in enumerate(passes) if each != _IDLE}
    usual = round(max(counted.values(), default=0.0))
    for rank, each in counted.items():
        if abs(each - usual) > 1e-6 * max(1, usual):
            raise TaskError(
                f"in step {now.step} rank {rank} counted {each:.4g} times its samples, others "
                f"{usual} times: in each loss count every sample of the batch once (a batch cut "
                "into pieces: all of them), or say what else the loss is the mean over, as in "
                'worker.backward(loss, count=tokens, of="tokens").'
            )
