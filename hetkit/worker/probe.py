"""The probe: a few forward and backward passes before training, whose traces are removed.

It finds out early what would otherwise surface as a riddle in the middle of DDP: a loss that is not
a scalar, parameters that get no gradient. On emulated devices it also measures what the emulation
needs: how fast this machine really computes the task, and how many bytes a sample keeps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from hetkit.errors import LossError, TaskError
from hetkit.task import Task
from hetkit.worker.batchnorm import SharedStatistics
from hetkit.worker.data import Samples, to_device
from hetkit.worker.loss import measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What the probe found.

    Args:
        unused: Names of the parameters that got no gradient.
        counted: Whether the loss returns ``(mean, count)``.
        sample_s: Real seconds of compute per sample on this machine.
        sample_bytes: Bytes that one sample keeps for the backward (saved tensors).
    """

    unused: tuple[str, ...]
    counted: bool
    sample_s: float
    sample_bytes: float


def probe(
    task: Task,
    model: torch.nn.Module,
    samples: Samples,
    *,
    size: int,
    device: torch.device,
    repeats: int,
    statistics: SharedStatistics | None = None,
) -> Probe:
    """Runs the task's forward and backward on the first samples and restores the model.

    Args:
        task: What is trained.
        model: The built model; parameters, buffers and gradients are as before afterwards.
        samples: The training data.
        size: Samples in a pass; at least 2 are taken where there are so many, since some layers
            (BatchNorm) refuse one.
        device: Where the model lives.
        repeats: Timed passes; the fastest counts. 0: the first pass is the only one.
        statistics: What the batch normalisation layers share; learns how often they run.

    Raises:
        LossError: The loss is not a scalar that depends on the parameters.
        TaskError: The model has no parameter to train, or one without a shape.
    """
    shapeless = [name for name, p in model.named_parameters() if is_lazy(p)]
    if shapeless:
        raise TaskError(
            f"{', '.join(shapeless)} have no shape yet: run the model's lazy modules on a sample "
            "inside model=…, before it is returned."
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise TaskError("the model has no parameter that requires a gradient: nothing to train.")
    size = min(max(size, 2), len(samples))
    batch = to_device(samples.fetch(range(size)), device)
    with _restored(model):
        first = _pass(task, model, batch, size, statistics)
        unused = tuple(name for name, p in trainable.items() if p.grad is None)
        timed = [_pass(task, model, batch, size).seconds for _ in range(repeats)]
    if len(unused) == len(trainable):
        raise LossError(
            "the loss depends on no parameter of the model: compute it from its output."
        )
    return Probe(
        unused=unused,
        counted=first.counted,
        sample_s=min([first.seconds, *timed]) / size,
        sample_bytes=first.kept_bytes / size,
    )


class _Pass(NamedTuple):
    kept_bytes: float
    seconds: float
    counted: bool


def _pass(
    task: Task,
    model: torch.nn.Module,
    batch: Any,
    size: int,
    statistics: SharedStatistics | None = None,
) -> _Pass:
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    began = time.monotonic()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        returned = task.loss(model, batch)
        if statistics is not None:
            statistics.end_forward()
        mean, _, counted = measure(returned, size, reduction=task.reduction)
        if not isinstance(mean, torch.Tensor) or not mean.requires_grad:
            raise LossError("the loss has no gradient: return a tensor computed from the model.")
        mean.backward()  # type: ignore[no-untyped-call]
    seconds = time.monotonic() - began
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return _Pass(float(sum(kept.values())), seconds, counted)


@contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    # A forward may also put new tensors in its buffers' places.
    places = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    on_cuda = any(tensor.is_cuda for tensor in tensors)
    devices = [torch.cuda.current_device()] if on_cuda else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, name, buffer in places:
            setattr(module, name, buffer)
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        for parameter in model.parameters():
            parameter.grad = None
