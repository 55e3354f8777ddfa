"""Error feedback: what did not travel is added to the next step's gradient.

With x = gradient + residual, a codec sends c(x) and keeps x − c(x). Nothing is lost for good then:
what has arrived and what still waits add up to all that was given. So SGD with a biased codec
converges at the rate of SGD without one [1]_.

Residuals belong to parameters by name, since buckets change. A step's new residuals are pending
until it is known to be good on all ranks: a skipped step must leave no trace, least of all a NaN.

.. [1] S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
   schemes", ICML 2019.
"""

from collections.abc import Mapping
from typing import Any

import torch


class Feedback:
    """The residuals of one rank, each with a spare of its size that the next step writes to.

    Example:
        >>> feedback, rest = Feedback(), torch.tensor([0.5])
        >>> feedback.put("w", rest)
        >>> feedback.settle(good=True)
        >>> feedback.add("w", rest)
        >>> rest
        tensor([1.])
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor) -> None:
        """Adds what waits of a parameter to ``values``, in place; of another size, nothing."""
        kept = self._kept.get(name)
        if kept is not None and kept.numel() == values.numel():
            values += kept.to(values).view_as(values)

    def put(self, name: str, rest: torch.Tensor) -> None:
        """Copies a parameter's new residual; it is pending."""
        self.room(name, rest).copy_(rest)

    def room(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Returns where to write a parameter's new residual, in the form of ``like``; pending."""
        spare = self._spare.pop(name, None)
        if spare is None or spare.numel() != like.numel() or spare.dtype != like.dtype:
            spare = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        self._pending[name] = spare
        return spare.view(like.shape)

    def settle(self, good: bool) -> None:
        """Keeps what is pending, or drops it."""
        for name, rest in self._pending.items():
            old = self._kept.get(name) if good else rest
            if good:
                self._kept[name] = rest
            if old is not None:
                self._spare[name] = old
        self._pending = {}

    def norm(self) -> float:
        """Returns the Euclidean norm of all that waits."""
        norms = [kept.norm().double().cpu() for kept in self._kept.values()]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies of the residuals by parameter name."""
        return {name: kept.detach().cpu().clone() for name, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes residuals; what waited before is dropped."""
        self._kept = {name: kept.clone() for name, kept in state.items()}
        self._pending, self._spare = {}, {}
