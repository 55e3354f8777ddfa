"""The objective: the task's loss of the model as one module, which is what DDP wraps.

DDP around the model alone would change what a loss may do: it would get DDP's wrapper, without the
model's own methods and attributes; it could call the model only once; and since DDP looks for
unused parameters in what its forward *returned*, a head that the model computes and the loss
ignores would stop the training. Around the loss, the graph that DDP sees is the one that runs
backward, and the loss gets the very model that the user wrote.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Objective(torch.nn.Module):
    """``loss(model, batch)`` as a module.

    Args:
        model: The model.
        loss: The task's loss.
        used: The parameters that get a gradient from it.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> objective = Objective(model, lambda model, batch: model(batch).mean(), [model.weight])
        >>> objective(None).backward()
        >>> model.weight.grad, model.bias.grad
        (tensor([[0., 0.]]), None)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        used: Sequence[torch.nn.Parameter],
    ) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._used = list(used)

    def forward(self, batch: Any) -> Any:
        """Returns what the loss returns; for None, a zero whose gradients are all zero.

        The zero is for a rank without samples: it takes part in the exchange like all others, and
        runs nothing of the user's.
        """
        return self.zero() if batch is None else self._loss(self.model, batch)

    def zero(self) -> torch.Tensor:
        """Returns 0 as a function of every used parameter."""
        reals = (torch.view_as_real(p) if p.is_complex() else p for p in self._used)
        return torch.stack([(real.sum() * 0).float() for real in reals]).sum()
