r"""Batch normalisation over the samples of all ranks, so that it does not depend on the split.

With n_i values per channel on rank *i*, their mean m_i and M_i = Σ (x − m_i)², every rank gathers
all (n_i, m_i, M_i) and merges them, all in the same order and so to the same bits::

    N = Σ n_i     m = Σ n_i·m_i / N     v = (Σ M_i + Σ n_i·(m_i − m)²) / N
    y = (x − m) / √(v + ε) · w + b

(Chan, Golub and LeVeque 1979: nothing cancels, as it would in E[x²] − m².) The running variance
takes v·N/(N − 1). Backward, with the sums over all ranks' values and s = 1/√(v + ε)::

    ∂x = w·s·(∂y − Σ∂y/N − (x − m)·s²·Σ(∂y·(x − m))/N)

PyTorch's own SyncBatchNorm is for GPUs alone, and expects a batch on every rank.

**Every rank must make the same calls.** A rank without samples runs the model on a stand-in that
counts nothing (n_i = 0, ∂x = 0); a micro-batch whose loss counts nothing runs backward from the
layers. What is not mended: a loss that runs the layers for some batches only, which is refused.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hetkit.errors import LossError


class SharedStatistics:
    """What the batch normalisation layers of one model share while it trains.

    Attributes:
        active: Whether the layers look across the ranks; off, as at first, each is PyTorch's own.
        waited_s: Seconds that the step's exchanges took. On CUDA they do not hold the host up, are
            not seen, and count as compute.

    Example:
        >>> layer = torch.nn.BatchNorm1d(2)
        >>> statistics = share_batchnorm(layer)
        >>> statistics.active, layer(torch.tensor([[0.0, 1.0], [2.0, 3.0]])).shape
        (False, torch.Size([2, 2]))
    """

    def __init__(self) -> None:
        self.active = False
        self.waited_s = 0.0
        self._group: dist.ProcessGroup | None = None
        self._waited: Callable[[float], None] | None = None
        self._empty = False
        self._loss_scale = 1.0
        self._starts: list[torch.Tensor] = []
        self._calls = 0
        self._usual: int | None = None

    def join(self, group: dist.ProcessGroup, waited: Callable[[float], None] | None = None) -> None:
        """Has the layers look across the ranks from here on.

        Args:
            group: A process group that nothing else uses.
            waited: Called with the seconds that each exchange took, where the host waits for it.
        """
        self.active = True
        self._group, self._waited = group, waited

    def begin_micro_batch(self, *, empty: bool, loss_scale: float) -> None:
        """Forgets the micro-batch before.

        Args:
            empty: What comes is a stand-in: it takes part and counts nothing.
            loss_scale: What this rank's loss is multiplied by; the ranks' may differ.
        """
        self._empty = empty
        self._loss_scale = loss_scale
        self._starts = []
        self._calls = 0

    def end_forward(self) -> None:
        """Checks that the layers ran as often as the first time.

        Raises:
            LossError: They did not, while the other ranks may still be waiting for them.
        """
        if self._usual is None:
            self._usual = self._calls
        if self.active and self._calls != self._usual:
            raise LossError(
                f"the model's BatchNorm layers ran {self._calls} times for this micro-batch, and "
                f"{self._usual} times for the first samples. They look across the devices, so "
                "every call of the loss must run the same layers: also for a batch whose count is "
                "0. Or give Task(sync_batchnorm=False)."
            )

    def end_micro_batch(self) -> None:
        """Lets go of the graph."""
        self._starts = []

    def take_waited_s(self) -> float:
        """Returns the seconds waited since it was last asked."""
        seconds, self.waited_s = self.waited_s, 0.0
        return seconds

    def starts(self, within: set[Any] | None) -> list[torch.Tensor]:
        """Returns zeros from which backward runs through each layer's call of this micro-batch.

        Args:
            within: The graph nodes that count; None: all.
        """
        return [
            start
            for start in self._starts
            if start.grad_fn is not None and (within is None or start.grad_fn in within)
        ]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Returns every rank's ``local``, stacked in rank order."""
        began = time.monotonic()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, local, group=self._group)
        self._account(began, local)
        return torch.stack(parts)

    def sum_gradients(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, each rank's in its own loss scale, in this rank's."""
        began = time.monotonic()
        total = local / self._loss_scale
        dist.all_reduce(total, group=self._group)
        self._account(began, local)
        return total * self._loss_scale

    def _account(self, began: float, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            return
        seconds = time.monotonic() - began
        self.waited_s += seconds
        if self._waited is not None:
            self._waited(seconds)


class _SharedBatchNorm(_BatchNorm):
    """A batch normalisation layer that looks across the ranks while it trains."""

    _statistics: SharedStatistics | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises by the statistics of all ranks' values; in eval mode, as PyTorch does."""
        shared = self._statistics
        if shared is not None and self.training:
            shared._calls += 1
        if shared is None or not shared.active or not self.training:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        mean, variance, total = _merged(input.detach(), shared)
        self._track(mean, variance, total)
        output, start = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, total, self.eps, shared
        )
        shared._starts.append(start)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        new = self.momentum
        if new is None:  # the plain average of all batches so far
            new = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.mul_(1 - new).add_(value.to(running.dtype), alpha=new)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_statistics"}


class SharedBatchNorm1d(_SharedBatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over all ranks."""


class SharedBatchNorm2d(_SharedBatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over all ranks."""


class SharedBatchNorm3d(_SharedBatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` over all ranks."""


class SharedBatchNorm(_SharedBatchNorm):
    """In place of `torch.nn.SyncBatchNorm`, which DDP refuses where it is not on a GPU."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_SHARED: dict[type[torch.nn.Module], type[_SharedBatchNorm]] = {
    torch.nn.BatchNorm1d: SharedBatchNorm1d,
    torch.nn.BatchNorm2d: SharedBatchNorm2d,
    torch.nn.BatchNorm3d: SharedBatchNorm3d,
    torch.nn.SyncBatchNorm: SharedBatchNorm,
}


def share_batchnorm(model: torch.nn.Module) -> SharedStatistics | None:
    """Makes the model's batch normalisation layers able to look across the ranks, in place.

    The modules stay the same objects, of a subclass of what they were (SyncBatchNorm's of its base
    class): references, hooks and names in a checkpoint stay good. Subclasses of PyTorch's layers
    are left alone: what their forward does is not known here.

    Returns:
        What the layers share; they are PyTorch's own until it has joined a group. None where there
        is no such layer.
    """
    layers = [module for module in model.modules() if type(module) in _SHARED]
    statistics = SharedStatistics()
    for layer in layers:
        layer.__class__ = _SHARED[type(layer)]
        layer._statistics = statistics  # type: ignore[assignment]
    return statistics if layers else None


def _merged(
    values: torch.Tensor, shared: SharedStatistics
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns mean, biased variance and number of the values per channel, over all ranks."""
    values = _precise(values)
    axes = [axis for axis in range(values.dim()) if axis != 1]
    channels = values.shape[1]
    count = 0 if shared._empty else values.numel() // channels
    local = values.new_zeros(2 * channels + 1)
    if count:
        variance, mean = torch.var_mean(values, axes, correction=0)
        local = torch.cat([local[:1] + count, mean, variance * count])
    every = shared.gather(local)
    counts, means = every[:, :1], every[:, 1 : channels + 1]
    total = counts.sum()
    if not total.is_cuda and total <= 1:  # a look at a CUDA tensor would hold the host up
        raise ValueError(
            "BatchNorm needs more than one value per channel over all devices to train on: the "
            "step has a single sample. Choose a global_batch that leaves more for the last step."
        )
    mean = (counts * means).sum(0) / total
    between = (counts * (means - mean).square()).sum(0)
    return mean, (every[:, channels + 1 :].sum(0) + between) / total, total


def _precise(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class _Normalise(torch.autograd.Function):
    """Normalises by statistics that depend on the input themselves, on all ranks.

    The second output is a zero, from which backward can be run through the layer alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        total: torch.Tensor,
        eps: float,
        shared: SharedStatistics,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt(), total)
        ctx.shared, ctx.empty = shared, shared._empty
        output = torch.nn.functional.batch_norm(
            input, mean, variance, weight, bias, training=False, eps=eps
        )
        return output, mean.new_zeros(())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse, total = ctx.saved_tensors
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
        grad, centred = _precise(grad), _precise(input) - mean.view(shape)
        local = torch.stack([grad.sum(axes), (grad * centred).sum(axes)])
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = ctx.shared.sum_gradients(local) / total
            factor = inverse if weight is None else inverse * weight
            along = (sums[1] * inverse.square()).view(shape)
            grad_input = (grad - sums[0].view(shape) - centred * along) * factor.view(shape)
            grad_input = grad_input.to(input.dtype)
            if ctx.empty:
                grad_input = torch.zeros_like(grad_input)
        grads: list[torch.Tensor | None] = [None, None]
        if ctx.needs_input_grad[1]:
            grads[0] = (local[1] * inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grads[1] = local[0].to(weight.dtype)
        return grad_input, *grads, None, None, None, None, None
