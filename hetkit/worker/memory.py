"""What a rank's memory holds, as far as it can be read; a missing reading is None."""

import time
from dataclasses import dataclass

import psutil
import torch

from hetkit.errors import PlanError
from hetkit.planning.memory import MemoryModel, fit_memory, largest_micro_batch
from hetkit.task import Task
from hetkit.worker.emulation import EmulatedMemory
from hetkit.worker.optimizers import on_copies, parameter_groups

PROCESS_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Bytes in use by this rank now, and at the highest."""

    used_bytes: float | None
    peak_bytes: float | None


class Peaks:
    """The peaks of the passes' sizes, and the p + q·μ that they show.

    A size's first step does not count: the optimizer's state may not be there yet, and kernels
    that are tried out take workspace that they give back.

    Example:
        >>> peaks = Peaks()
        >>> for size, peak in [(8, 990.0), (8, 1080.0), (32, 1320.0), (32, 1320.0)]:
        ...     peaks.add(size, peak)
        >>> peaks.model
        MemoryModel(fixed_bytes=1000.0, sample_bytes=10.0)
    """

    def __init__(self) -> None:
        self.model: MemoryModel | None = None
        self._met: set[int] = set()
        self._peaks: dict[int, float] = {}

    def add(self, micro_batch: int, peak_bytes: float) -> None:
        """Takes the peak of a step whose largest pass had ``micro_batch`` samples."""
        if micro_batch not in self._met:
            self._met.add(micro_batch)
        elif peak_bytes > self._peaks.get(micro_batch, 0.0):
            self._peaks[micro_batch] = peak_bytes
            if len(self._peaks) > 1:
                self.model = fit_memory(list(self._peaks.items()))


class MemoryMeter:
    """Reads the rank's memory: the caching allocator's on CUDA, the process's on the CPU.

    Args:
        device: Where the model lives.
        emulated: The emulated device's memory, which is then what is reported.
    """

    def __init__(self, device: torch.device, emulated: EmulatedMemory | None) -> None:
        self._peaks = Peaks()
        self._device = device
        self._emulated = emulated
        self._process = psutil.Process()
        self._process_bytes = self._peak = 0.0
        self._next_read = 0.0

    def take(self, micro_batch: int) -> None:
        """Tells that a pass over ``micro_batch`` samples begins.

        Raises:
            EmulatedOutOfMemoryError: An emulated device does not hold that many.
        """
        if self._emulated is not None:
            self._emulated.use(micro_batch)

    def read(self, micro_batch: int, *, whole: bool = True) -> MemoryReading:
        """Reads the memory of a step.

        Args:
            micro_batch: Samples of the step's largest pass.
            whole: Whether all passes of the step ended, so that its peak is that pass's.

        Raises:
            EmulatedOutOfMemoryError: An emulated device does not hold that many.
        """
        if self._emulated is not None:
            used = peak = self._emulated.use(micro_batch)
        elif self._device.type == "cuda":
            used = float(torch.cuda.memory_allocated(self._device))
            peak = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
            if whole:
                self._peaks.add(micro_batch, peak)
        else:
            used = peak = self._read_process()
        self._peak = max(self._peak, peak)
        return MemoryReading(used_bytes=used, peak_bytes=self._peak)

    def largest_fit(self) -> int | None:
        """Returns the largest micro-batch that fits, by the peaks of two sizes of a real device.

        None before there are two, and where peaks say nothing: on the CPU, and for an emulated
        device, whose memory is known from the start.
        """
        model = self._peaks.model
        if model is None:
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        # What the caching allocator holds is ours to use; the rest of it, other processes have.
        size = free + torch.cuda.memory_reserved(self._device)
        try:
            return largest_micro_batch(model, size)
        except PlanError:  # it trains as it is, in less than the headroom
            return None

    def nothing_fits(self, error: BaseException) -> str:
        """Returns what to say when a single sample has run out of memory."""
        if self._emulated is not None:
            size: float | None = self._emulated.size_bytes
        elif self._device.type == "cuda":
            size = float(torch.cuda.mem_get_info(self._device)[1])
        else:
            size = float(psutil.virtual_memory().total)
        room = "" if size is None else f" The device has {size / 1e9:.2f} GB in all."
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"a single sample does not fit into the memory: {first}.{room} A smaller micro_batch "
            "is not possible: use a smaller model or sample, amp, or activation checkpointing in "
            "the model, free what others hold of the device, or leave it out."
        )

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
