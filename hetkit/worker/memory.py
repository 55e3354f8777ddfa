"""What a rank's memory holds, as far as it can be read; a missing reading is None."""

import time
from dataclasses import dataclass

import psutil
import torch

from hetkit.task import Task
from hetkit.worker.emulation import EmulatedMemory
from hetkit.worker.optimizers import on_copies, parameter_groups

PROCESS_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Bytes in use by this rank now, and at the highest."""

    used_bytes: float | None
    peak_bytes: float | None


class MemoryMeter:
    """Reads the rank's memory: the caching allocator's on CUDA, the process's on the CPU.

    Args:
        device: Where the model lives.
        emulated: The emulated device's memory, which is then what is reported.
    """

    def __init__(self, device: torch.device, emulated: EmulatedMemory | None) -> None:
        self._device = device
        self._emulated = emulated
        self._process = psutil.Process()
        self._process_bytes = self._peak = 0.0
        self._next_read = 0.0

    def read(self, micro_batch: int) -> MemoryReading:
        """Reads the memory with ``micro_batch`` samples in flight.

        Raises:
            EmulatedOutOfMemoryError: An emulated device does not hold that many.
        """
        if self._emulated is not None:
            used = self._emulated.use(micro_batch)
        elif self._device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(self._device))
            return MemoryReading(
                used_bytes=float(torch.cuda.memory_allocated(self._device)), peak_bytes=peak
            )
        else:
            used = self._read_process()
        self._peak = max(self._peak, used)
        return MemoryReading(used_bytes=used, peak_bytes=self._peak)

    def _read_process(self) -> float:
        # As often as rows are sent: asking the kernel costs more than the rest of a step's account.
        now = time.monotonic()
        if now >= self._next_read:
            self._next_read = now + PROCESS_EVERY_S
            self._process_bytes = float(self._process.memory_info().rss)
        return self._process_bytes


def training_bytes(task: Task, model: torch.nn.Module) -> float:
    """Returns the bytes of weights, gradients, optimizer state and, if there is one, the average.

    It is the fixed part p of p + q·μ. The optimizer's state is counted on a throw-away optimizer
    over copies of the parameters, after one step with zero gradients.
    """
    copies: dict[torch.Tensor, torch.Tensor] = {
        p: torch.nn.Parameter(p.detach().clone()) for p in model.parameters() if p.requires_grad
    }
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    optimizer = task.optimizer(on_copies(parameter_groups(task, model), copies))
    optimizer.step()
    state = [
        value
        for per_parameter in optimizer.state.values()
        for value in per_parameter.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [copy.grad for copy in copies.values()]
    average = [] if task.ema is None else model.parameters()
    tensors = [*model.parameters(), *model.buffers(), *gradients, *state, *average]
    return float(sum(t.numel() * t.element_size() for t in tensors if t is not None))
