"""The learning rate: the task's own, its scheduler's, or what the user set for now."""

from collections.abc import Callable
from typing import Any

import torch


class LearningRate:
    """Keeps the task's own rates apart from the user's override, so that either can come back.

    Args:
        optimizer: The task's optimizer.
        scheduler: Makes its scheduler, stepped once an epoch; None for none.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> rate = LearningRate(optimizer, None)
        >>> rate.override(None, 0.5)
        >>> optimizer.param_groups[0]["lr"]
        0.05
        >>> rate.override(None, None)
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Callable[[Any], Any] | None
    ) -> None:
        self._optimizer = optimizer
        self.scheduler = scheduler(optimizer) if scheduler else None
        self._own = [group["lr"] for group in optimizer.param_groups]

    def override(self, lr: float | None, factor: float | None) -> None:
        """Sets every group to ``lr``, or to ``factor`` × its own rate, or back to its own."""
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            group["lr"] = lr if lr is not None else own if factor is None else own * factor

    def end_epoch(self) -> None:
        """Steps the scheduler on the task's own rates."""
        self.override(None, None)
        if self.scheduler is not None:
            self.scheduler.step()
        self._own = [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        state = self.scheduler.state_dict() if self.scheduler is not None else None
        return {"own": list(self._own), "scheduler": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint's state."""
        self._own = list(state["own"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
