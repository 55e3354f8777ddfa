"""The objective: the task's loss of the model as one module, which is what DDP wraps.

DDP around the model alone would change what a loss may do: it would get DDP's wrapper, without the
model's own methods and attributes; it could call the model only once; and since DDP looks for
unused parameters in what its forward *returned*, a head that the model computes and the loss
ignores would stop the training. Around the loss, the graph that DDP sees is the one that runs
backward, and the loss gets the very model that the user wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from hetkit.worker.batchnorm import SharedStatistics
from hetkit.worker.graph import ancestors, anchor, leaves


class Passed(NamedTuple):
    """What a forward gave.

    Attributes:
        returned: What the loss returned.
        anchor: Where the use of parameters varies: a zero to add to the loss, from which backward
            visits every parameter; else None.
    """

    returned: Any
    anchor: torch.Tensor | None


class Objective(torch.nn.Module):
    """``loss(model, batch)`` as a module.

    Args:
        model: The model.
        loss: The task's loss.
        used: Name to parameter, for those that get a gradient from it.
        varying: Which parameters get a gradient may differ between batches.
        statistics: What the batch normalisation layers share, or None.
        stand_in: Where there are ``statistics``: the batch that a rank without samples runs, so
            that its layers take part.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> objective = Objective(
        ...     model, lambda model, batch: model(batch).mean(), {"weight": model.weight}
        ... )
        >>> objective(None).returned.backward()
        >>> model.weight.grad, model.bias.grad
        (tensor([[0., 0.]]), None)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        used: Mapping[str, torch.nn.Parameter],
        *,
        varying: bool = False,
        statistics: SharedStatistics | None = None,
        stand_in: Any = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.varying = varying
        self._loss = loss
        self._used = dict(used)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.statistics = statistics
        self._stand_in = stand_in
        if varying:
            # DDP warns when it finds no unused parameter, and the anchor leaves it none but this.
            self.spare = torch.nn.Parameter(self._trained[0].detach().new_zeros(1))
        self._sparse = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        }

    def forward(self, batch: Any) -> Passed:
        """Returns what the loss returns; for None, a zero whose gradients are all zero.

        The zero is for a rank without samples: it takes part in the exchange like all others, and
        runs nothing of the user's, unless layers look across the ranks.
        """
        visited = anchor(*self._trained) if self.varying else None
        if batch is not None:
            return Passed(self._loss(self.model, batch), visited)
        if self.statistics is None or not self.statistics.active:
            return Passed(self.zero(), visited)
        return Passed(self.zero(self._loss(self.model, self._stand_in)), visited)

    def zero(self, instead: Any = None) -> torch.Tensor:
        """Returns 0 as a function of every used parameter.

        Args:
            instead: The loss that it stands for, of a batch that counts nothing. The layers that
                look across the ranks, and that this loss comes from, take part in the backward.
        """
        zero = torch.zeros((), device=self._trained[0].device)
        if not self.varying:
            zero = torch.stack([self._zero_of(p) for p in self._used.values()]).sum()
        if self.statistics is not None and self.statistics.active:
            mean = instead[0] if isinstance(instead, tuple | list) else instead
            known = isinstance(mean, torch.Tensor) and mean.requires_grad
            for start in self.statistics.starts(ancestors(mean) if known else None):
                zero = zero + start
        return zero

    def rest(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns 0 as a function of ``parameters`` alone, those that DDP still waits for."""
        if self.varying:
            return anchor(*parameters)
        wanted = {id(parameter) for parameter in parameters}
        waited_for = [p for p in self._used.values() if id(p) in wanted]
        return torch.stack([self._zero_of(p) for p in waited_for]).sum()

    def missing(self, loss: torch.Tensor) -> list[str]:
        """Returns the names of the used parameters that ``loss`` does not depend on."""
        reached = leaves(ancestors(loss))
        return [name for name, parameter in self._used.items() if parameter not in reached]

    def _zero_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if id(parameter) in self._sparse:  # its gradient must be sparse here too
            first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
            return (functional.embedding(first, parameter, sparse=True).sum() * 0).float()
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        return (real.sum() * 0).float()
