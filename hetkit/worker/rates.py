"""The learning rate: the task's own, its scheduler's, or what the user set for now."""

import math
from collections.abc import Callable
from typing import Any

import torch

from hetkit.errors import TaskError


class LearningRate:
    """Keeps the task's own rates apart from the user's override, so that either can come back.

    The scheduler always goes on from the task's own rates, whatever is in force: once an epoch, or
    once for every step that the optimizer made. A step that all ranks skip (a gradient was not
    finite) does not move it, so the k-th update has the k-th rate; that is what PyTorch's AMP
    recipes recommend and Accelerate does.

    Args:
        optimizer: The task's optimizer.
        scheduler: Makes its scheduler; None for none.
        per: ``"epoch"`` or ``"step"``: what moves the scheduler.

    Raises:
        TaskError: The scheduler's step wants a measurement.

    Attributes:
        first_batch: The global batch of the training's first step, which a rule is relative to.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> rate = LearningRate(optimizer, None)
        >>> rate.override(None, 0.5)
        >>> rate.now
        0.05
        >>> rate.override(None, None)
        >>> rate.now
        0.1
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Callable[[Any], Any] | None,
        per: str = "epoch",
    ) -> None:
        self.scheduler = scheduler(optimizer) if scheduler else None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TaskError(
                "ReduceLROnPlateau wants a measurement at each step, and schedulers are stepped "
                'without one: look at session.ledger and session.set(lr="x0.1"), or give another.'
            )
        self.first_batch: int | None = None
        self._optimizer = optimizer
        self._per = per
        self._own = [group["lr"] for group in optimizer.param_groups]
        self._override: tuple[float | None, float | None] = (None, None)

    @property
    def now(self) -> float:
        """The first group's rate in force."""
        return float(self._optimizer.param_groups[0]["lr"])

    def override(self, lr: float | None, factor: float | None) -> None:
        """Sets every group to ``lr``, or to ``factor`` × its own rate, or back to its own."""
        self._override = (lr, factor)
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            group["lr"] = lr if lr is not None else own if factor is None else own * factor

    def rule_factor(self, rule: str, global_batch: int) -> float | None:
        """Returns what a rule multiplies the task's own rates by; None for nothing.

        With k = global batch / the training's first one: k for ``"linear"`` (Goyal et al. 2017,
        for SGD), √k for ``"sqrt"`` (Krizhevsky 2014; Malladi et al. 2022, for Adam).

        Args:
            rule: One of `hetkit.settings.LR_RULES`.
            global_batch: The one in force.
        """
        if self.first_batch is None:
            self.first_batch = global_batch
        return batch_rule(rule, global_batch / self.first_batch)

    def end_step(self) -> None:
        """The optimizer has made a step: moves a scheduler that goes by steps."""
        if self._per == "step":
            self._advance()

    def end_epoch(self) -> None:
        """An epoch has ended: moves a scheduler that goes by epochs."""
        if self._per == "epoch":
            self._advance()

    def _advance(self) -> None:
        if self.scheduler is None:
            return
        lr, factor = self._override
        self.override(None, None)
        self.scheduler.step()
        self._own = [group["lr"] for group in self._optimizer.param_groups]
        self.override(lr, factor)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        state = self.scheduler.state_dict() if self.scheduler is not None else None
        return {"own": list(self._own), "scheduler": state, "first_batch": self.first_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint's state."""
        self._own = list(state["own"])
        self.first_batch = state["first_batch"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def batch_rule(rule: str, ratio: float) -> float | None:
    """Returns what a rule multiplies a rate by when the global batch has grown by ``ratio``.

    Example:
        >>> batch_rule("linear", 2.0), batch_rule("sqrt", 4.0), batch_rule("none", 2.0)
        (2.0, 2.0, None)
    """
    if rule == "none" or ratio == 1:
        return None
    return ratio if rule == "linear" else math.sqrt(ratio)
