"""The exponential moving average of the weights (EMA), kept beside the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WeightAverage:
    """Averages a model's weights over its updates: a ← d·a + (1 − d)·w.

    As ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(d)`` does it (Polyak and
    Juditsky 1992; Tarvainen and Valpola 2017): the first update copies, and buffers are the
    model's own. Every rank keeps one; since the weights are bit-equal on all ranks, so are the
    averages, for every split.

    Args:
        model: Whose weights are averaged; frozen ones too, so that the average is a whole model.
        decay: The d, in [0, 1).

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(model, decay=0.75)
        >>> for weight in (0.0, 4.0):
        ...     _ = torch.nn.init.constant_(model.weight, weight)
        ...     average.update()
        >>> with average.in_place():
        ...     print(model.weight.item())
        1.0
        >>> model.weight.item()
        4.0
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._updates = 0
        self._average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, steps: int = 1) -> None:
        """Takes the weights in; with local steps, once for all ``steps`` since the last time."""
        averages, weights = self._pairs()
        if self._updates == 0:
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, 1 - self._decay**steps)
        self._updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the model's place while the block runs."""
        averages, weights = self._pairs()
        trained = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, trained)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"parameters": dict(self._average), "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes a checkpoint's state; None: the average begins anew, from the model as it is."""
        if state is None:
            self._updates = 0
            return
        self._updates = state["updates"]
        for name, average in self._average.items():
            average.copy_(state["parameters"][name])

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        weights = dict(self._model.named_parameters())
        return list(self._average.values()), [weights[name].detach() for name in self._average]
