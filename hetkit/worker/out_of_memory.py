"""Out of memory: what it looks like, what is let go, and which gradients are still missing.

A pass that ran out of memory has left a part of its work behind. A parameter's gradient is added
once per backward, as a whole, so each parameter either has all of the pass's gradient or none::

    backward   head.weight ✓   layer2.weight ✓   ✗ out of memory   layer1.weight –   embed –
                    └ their gradients are right ┘                      └ these are missing ┘

So the pass's samples are computed again, in smaller pieces, for the missing ones alone. No sample
is lost or counted twice, whatever DDP has handed over by then.
"""

import functools
import gc
import traceback
from collections.abc import Sequence
from typing import cast

import torch

_SIGNS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether a device's memory, or the host's, did not suffice.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def let_go(error: BaseException, device: torch.device) -> None:
    """Frees what the failed pass held: call it when no frame of one's own holds its tensors."""
    # The frames of the traceback hold the activations.
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Arrivals:
    """Tells which parameters have got their gradient in a backward pass.

    While no parameter has a gradient yet, having one tells it. In a pass that adds to gradients of
    passes before, a hook on each parameter does; the hooks are there from the first such pass on.

    Args:
        parameters: Those that are trained.

    Example:
        >>> weight, bias = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> arrivals = Arrivals([weight, bias])
        >>> arrivals.begin()
        >>> (2 * weight).backward()
        >>> arrivals.missing() == (bias,), arrivals.any
        (True, True)
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._arrived: set[int] = set()
        self._hooked = False

    def begin(self) -> None:
        """A backward pass is about to begin."""
        self._arrived.clear()
        if not self._hooked and any(p.grad is not None for p in self._parameters):
            self._hooked = True
            for place, parameter in enumerate(self._parameters):
                mark = functools.partial(_mark, self._arrived, place)
                parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]

    @property
    def any(self) -> bool:
        """Whether a parameter has got its gradient."""
        return len(self.missing()) < len(self._parameters)

    def missing(self) -> tuple[torch.Tensor, ...]:
        """Returns the parameters that have not got theirs."""
        if self._hooked:
            places = enumerate(self._parameters)
            return tuple(p for place, p in places if place not in self._arrived)
        return tuple(p for p in self._parameters if p.grad is None)


def _mark(arrived: set[int], place: int, _: torch.Tensor) -> None:
    arrived.add(place)


def add_gradients(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    """Adds the loss's gradient to these parameters' alone, past any hook on them.

    The gradients come all at once: if the memory does not suffice, none was added.
    """
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = cast("Sequence[torch.Tensor | None]", found)  # None where it depends on none
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient.is_sparse:
            parameter.grad = parameter.grad + gradient
        else:  # in place: it may be a view of DDP's bucket
            parameter.grad.add_(gradient)


class Buffers:
    """A model's buffers as they were before a pass, such as batch normalisation's statistics.

    Args:
        model: The model. Buffers that its first pass leaves alone are not kept later on.

    Example:
        >>> layer = torch.nn.BatchNorm1d(1)
        >>> buffers = Buffers(layer)
        >>> buffers.keep()
        >>> _ = layer(torch.tensor([[1.0], [3.0]]))
        >>> buffers.restore()
        >>> layer.running_mean.item(), layer.num_batches_tracked.item()
        (0.0, 0)
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept: list[torch.Tensor] = []
        self._sifted = False

    @torch.no_grad()
    def keep(self) -> None:
        """Remembers them."""
        if self._kept and not self._sifted:
            self._sift()
        if not self._kept:
            self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        if self._kept:
            torch._foreach_copy_(self._kept, self._buffers)

    def _sift(self) -> None:
        # By value: batch normalisation moves its statistics without a new version of the tensor.
        pairs = zip(self._buffers, self._kept, strict=True)
        self._buffers = [buffer for buffer, kept in pairs if not torch.equal(buffer, kept)]
        self._kept = []
        self._sifted = True

    @torch.no_grad()
    def restore(self) -> None:
        """Puts them back."""
        if self._kept:
            torch._foreach_copy_(self._buffers, self._kept)
