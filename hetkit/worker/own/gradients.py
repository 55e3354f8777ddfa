"""Gradients of an own loop: what one optimizer has accumulated, and its sum over the ranks.

Each loss is the mean over `count` things, and its gradient gets the weight count / N̂, with N̂ the
step's samples over all ranks. So for means over samples the *sum* over ranks and calls is right at
once, however the samples were cut, and several losses simply add up::

    Σ_ranks Σ_calls ∇(mean · count) / N̂   =   ∇(the mean over the whole batch)   for each loss

A mean over something else (tokens, pixels) is named: its gradients are kept apart from others, and
multiplied by N̂ / N once its own denominator N, the sum of its counts, is known, which is when the
optimizer steps.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch

from hetkit.planning.exchange_time import BUCKET_BYTES
from hetkit.worker.exchange import Exchange

SAMPLES = "samples"
"""What a loss is the mean over, unless the user says otherwise."""


class Gradients:
    """What one optimizer's parameters have accumulated since its last step.

    Args:
        optimizer: The user's optimizer.

    Attributes:
        passes: How often each sample of the rank was counted, in means over samples.
        counts: Denominators so far on this rank, by name, but for samples.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> gradients = Gradients(torch.optim.SGD([weight], lr=1.0))
        >>> gradients.enter("tokens")
        >>> weight.grad = torch.ones(1)
        >>> gradients.count(3.0, of="tokens", share=2)
        >>> gradients.merge({"tokens": 12.0}, planned=4)
        >>> weight.grad / 3
        tensor([0.1111])
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.passes = 0.0
        self.counts: dict[str, float] = {}
        self._optimizer = optimizer
        self._kept: dict[str, dict[torch.nn.Parameter, torch.Tensor]] = {}
        self._current = SAMPLES

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The optimizer's parameters that are trained."""
        groups = self._optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def named(self, number: int) -> dict[str, torch.Tensor]:
        """Returns the gradients that there are, named by place: an optimizer's order is its own.

        Args:
            number: The optimizer's, among the loop's.
        """
        return {
            f"{number}.{place}": parameter.grad
            for place, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }

    def enter(self, of: str) -> None:
        """From now on backward passes add to the gradients of the means over ``of``."""
        if of == self._current:
            return
        fetched = self._kept.pop(of, {})
        self._kept[self._current] = kept = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                kept[parameter] = parameter.grad
            parameter.grad = fetched.get(parameter)
        self._current = of

    def count(self, count: float, *, of: str, share: int) -> None:
        """Counts a backward pass; ``share`` is the rank's samples in the step."""
        if of == SAMPLES:
            self.passes += count / share if share else 0.0
        else:
            self.counts[of] = self.counts.get(of, 0.0) + count

    @property
    def names(self) -> float:
        """A number that tells one set of named denominators from another."""
        return float(zlib.crc32("\n".join(sorted(self.counts)).encode())) if self.counts else 0.0

    @property
    def missing(self) -> float:
        """How many parameters have no gradient on this rank."""
        stores = self._kept.values()
        return float(
            sum(p.grad is None and not any(p in kept for kept in stores) for p in self.parameters)
        )

    def merge(self, totals: dict[str, float], *, planned: int) -> None:
        """Puts all gradients back together: those of a named mean over N things times N̂ / N.

        Args:
            totals: Each named denominator, over all ranks.
            planned: N̂, the step's samples over all ranks.
        """
        self.enter(SAMPLES)
        for name, kept in self._kept.items():
            factor = planned / totals[name] if totals.get(name) else 0.0
            for parameter, gradient in kept.items():
                gradient.mul_(factor)
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )
        self._kept = {}

    def clear(self) -> None:
        """Forgets everything."""
        self.passes = 0.0
        self.counts = {}
        self._kept = {}
        self._current = SAMPLES
        for parameter in self.parameters:
            parameter.grad = None


def fill(parameters: Sequence[torch.nn.Parameter], present: Sequence[bool]) -> list[torch.Tensor]:
    """Returns the gradients that exist on some rank; where this one has none, zeros.

    A parameter without a gradient on any rank keeps none, so that optimizers pass over it, as they
    do in one process. Sparse gradients become dense.
    """
    for parameter, there in zip(parameters, present, strict=True):
        if there and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    return [p.grad for p in parameters if p.grad is not None]


def sum_over_ranks(
    exchange: Exchange, gradients: Mapping[str, torch.Tensor], bucket_bytes: int | None
) -> None:
    """Sums gradients over all ranks, in place, in buckets and through the codec in force.

    Args:
        exchange: The gradient exchange.
        gradients: By a name that the parameter keeps, on all ranks and over a restart.
        bucket_bytes: How much travels at once; None: 25 MiB.
    """
    handed = []
    names = {id(gradient): name for name, gradient in gradients.items()}
    for bucket in _buckets(gradients.values(), bucket_bytes or BUCKET_BYTES):
        flat = torch.cat([gradient.detach().reshape(-1) for gradient in bucket])
        shapes = [(names[id(gradient)], gradient.shape) for gradient in bucket]
        handed.append((bucket, flat, exchange.submit(flat, shapes)))
    for bucket, flat, future in handed:
        future.wait()
        start = 0
        for gradient in bucket:
            stop = start + gradient.numel()
            gradient.copy_(flat[start:stop].view(gradient.shape))
            start = stop


def _buckets(gradients: Iterable[torch.Tensor], limit_bytes: int) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    kinds = sorted(
        gradients, key=lambda g: (str(g.device), str(g.dtype))
    )  # stable: keeps the order
    for _, same in groupby(kinds, key=lambda g: (g.device, g.dtype)):
        size, buckets = 0, [*buckets, []]
        for gradient in same:
            bytes_ = gradient.numel() * gradient.element_size()
            if buckets[-1] and size + bytes_ > limit_bytes:
                size, buckets = 0, [*buckets, []]
            buckets[-1].append(gradient)
            size += bytes_
    return buckets
