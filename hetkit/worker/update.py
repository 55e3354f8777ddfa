"""The update: what becomes of a step's gradient, decided alike on all ranks.

Check that it is finite, clip it, step the optimizer, move the scheduler, the loss scale and the
average of the weights. With local steps (`hetkit.worker.local_steps`) a rank decides for itself
until the next synchronisation.
"""

import math
from typing import Any

import torch

from hetkit.plan import Plan
from hetkit.task import Task
from hetkit.worker.ema import WeightAverage
from hetkit.worker.exchange import Exchange
from hetkit.worker.local_steps import LocalSteps, RankSteps, share_state
from hetkit.worker.optimizers import make_optimizer
from hetkit.worker.precision import LossScale, all_finite
from hetkit.worker.rates import LearningRate


class Update:
    """One rank's optimizer and all that moves with it.

    Args:
        task: Whose optimizer, scheduler and average of the weights it is.
        model: What is trained.
        exchange: The gradient exchange; None for a single rank.
        rank: This rank.

    Attributes:
        optimizer: The task's.
        rate: Its learning rate.
        loss_scale: What fp16 ranks multiply their loss by.
        average: The average of the weights, or None.
        lr: The first group's rate in the latest step.

    Example:
        >>> from hetkit.plan import Plan
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> weight = torch.nn.init.constant_(model.weight, 1.0)
        >>> task = Task(
        ...     model=torch.nn.Linear,
        ...     data=[0],
        ...     loss=lambda model, batch: model(batch).sum(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        ... )
        >>> plan = Plan(version=1, epoch=0, first_step=0, epoch_first_step=0, epoch_steps=1,
        ...             global_batch=1, batches=(1,), micro_batches=(1,), amp=("off",),
        ...             compression="none", lr_factor=0.5)
        >>> update = Update(task, model, exchange=None, rank=0)
        >>> update.apply(plan)
        >>> weight.grad = torch.ones(1, 1)
        >>> update.step(plan, planned=1, count=1.0), weight.item(), update.lr
        (True, 0.75, 0.25)
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, exchange: Exchange | None, rank: int
    ) -> None:
        self.optimizer = make_optimizer(task, model)
        self.rate = LearningRate(self.optimizer, task.scheduler, task.scheduler_per)
        self.loss_scale = LossScale()
        self.average = WeightAverage(model, task.ema) if task.ema is not None else None
        self.lr = self.rate.now
        self._model = model
        self._exchange = exchange
        self._rank = rank
        self._local = LocalSteps(model, exchange, rank)

    def apply(self, plan: Plan) -> None:
        """Makes ``plan`` the one in force."""
        factors = (plan.lr_factor, self.rate.rule_factor(plan.lr_rule, plan.global_batch))
        given = [factor for factor in factors if factor is not None]
        self.rate.override(plan.lr, math.prod(given) if given else None)
        if plan.local:
            self._local.begin()
        else:
            self._local.end()

    def scale(self, plan: Plan) -> float:
        """Returns what this rank multiplies its loss by."""
        return self.loss_scale.scale if plan.amp[self._rank] == "fp16" else 1.0

    def step(self, plan: Plan, *, planned: int, count: float) -> bool:
        """Makes the step with the gradient that all ranks share.

        Args:
            plan: The plan in force.
            planned: The denominator that each loss was divided by.
            count: The step's true denominator.

        Returns:
            Whether the gradient was finite; otherwise all ranks skip the step.
        """
        self.lr = self.rate.now
        gradients = self._gradients(plan, planned, count, exchanged=self._exchange is not None)
        # The buckets are few and hold every gradient: cheaper to look at than the parameters.
        exchange = self._exchange
        finite = all_finite(gradients) if exchange is None else exchange.all_finite()
        if exchange is not None:
            exchange.settle(finite)
        self._optimize(plan, finite)
        if finite:
            self.rate.end_step()
            if self.average is not None:
                self.average.update()
        if "fp16" in plan.amp:
            self.loss_scale.update(overflow=not finite)
        return finite

    def step_alone(self, plan: Plan, *, samples: int, planned: int, count: float) -> bool:
        """Makes this rank's own step; without a gradient, none.

        The scheduler moves on every rank at every step, so that the rates stay equal.

        Args:
            plan: The plan in force.
            samples: Samples of the step over all ranks.
            planned: What this rank's losses were divided by.
            count: This rank's true denominator.

        Returns:
            Whether this rank's gradient was finite; otherwise it skips the step, and it alone.
        """
        self.lr = self.rate.now
        self._local.plan_step(samples)
        finite = True
        if count:
            finite = all_finite(self._gradients(plan, planned, count, exchanged=False))
            self._optimize(plan, finite)
            if finite:
                self._local.made_step(count)
            if plan.amp[self._rank] == "fp16":
                self.loss_scale.update(overflow=not finite)
        self.optimizer.zero_grad(set_to_none=True)
        self.rate.end_step()
        return finite

    def exchange_changes(self, plan: Plan) -> tuple[RankSteps, ...]:
        """Sums what the ranks changed on their own; waits for the slowest."""
        scale = self.loss_scale
        return self._local.exchange(
            scale=scale.scale, good_steps=scale.good_steps, bucket_bytes=plan.bucket_bytes
        )

    def synchronise(self, plan: Plan, ranks: tuple[RankSteps, ...]) -> None:
        """Gives all ranks the average of what they changed, and one loss scale: the smallest.

        Args:
            plan: The plan in force.
            ranks: What `exchange_changes` returned.
        """
        steps = self._local.steps
        self._local.apply(ranks, outer_momentum=plan.outer_momentum)
        self._local.begin()
        scales = [
            (each.scale, each.good_steps)
            for each, precision in zip(ranks, plan.amp, strict=True)
            if precision == "fp16"
        ]
        if scales:
            self.loss_scale.scale, self.loss_scale.good_steps = min(scales)
        if self.average is not None:
            self.average.update(steps)

    def end_epoch(self, plan: Plan, busiest: int) -> None:
        """Moves the scheduler; after local steps, all ranks take the busiest one's optimizer."""
        self.rate.end_epoch()
        if plan.local and self._exchange is not None:
            device = next(self._model.parameters()).device
            share_state(self.optimizer, busiest, device)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "rate": self.rate.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "average": self.average.state_dict() if self.average is not None else None,
            "outer_momentum": self._local.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint's state; the model has taken its own."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.rate.load_state_dict(state["rate"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self._local.load_state_dict(state["outer_momentum"])
        self.lr = self.rate.now

    def _gradients(
        self, plan: Plan, planned: int, count: float, *, exchanged: bool
    ) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        factor = 1.0 if exchanged else 1.0 / self.scale(plan)  # the exchange unscales by itself
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        if count and count != planned:
            torch._foreach_mul_(gradients, planned / count)
        return gradients

    def _optimize(self, plan: Plan, finite: bool) -> None:
        if finite:
            if plan.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), plan.clip_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
