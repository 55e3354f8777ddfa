r"""How much memory a device needs for a micro-batch: m(μ) = p + q·μ, from measured peaks.

Weights, gradients, optimizer state and the library's own context (*p*) are there whatever the
batch; activations (*q*) are per sample of one micro-batch, and are freed before the next. So the
largest micro-batch that fits is

    μ_max = ⌊((1 − headroom)·size − p) / q⌋,

and a rank that is given more samples than that accumulates gradients over several micro-batches.
The headroom (8 % by default) is for what no peak of ours shows: fragmentation of the allocator,
workspaces of other kernels at other shapes, and other processes on the card.

The fit must not promise room that is not there, so it is an upper one: least squares through the
peaks gives the slope, and the line is then raised until no measured peak lies above it. Two peaks
are met exactly.

A micro-batch that ran out of memory nevertheless says that there is less than p + q·μ for us: the
cap after it leaves the headroom of that, but is at least half of what failed, and at most one less.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hetkit.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """A device's peak memory for a micro-batch of μ samples: p + q·μ.

    Args:
        fixed_bytes: The *p*, at least 0.
        sample_bytes: The *q*, at least 0.

    Raises:
        PlanError: A value is out of its range.

    Example:
        >>> MemoryModel(fixed_bytes=1000, sample_bytes=10).bytes(32)
        1320
    """

    fixed_bytes: float
    sample_bytes: float

    def __post_init__(self) -> None:
        if not 0 <= self.fixed_bytes < math.inf or not 0 <= self.sample_bytes < math.inf:
            raise PlanError(f"fixed_bytes and sample_bytes must be finite and at least 0: {self}.")

    def bytes(self, micro_batch: int) -> float:
        """Returns the peak bytes for a micro-batch of ``micro_batch`` samples."""
        return self.fixed_bytes + self.sample_bytes * micro_batch


def largest_micro_batch(model: MemoryModel, size_bytes: int, headroom: float = 0.08) -> int:
    """Returns the largest micro-batch that fits into a device.

    Args:
        model: What a micro-batch needs.
        size_bytes: Size of the device's memory, or what others have left of it.
        headroom: Share of the memory that stays free, at least 0 and below 1. Default 0.08.

    Returns:
        Samples, at least 1; ``sys.maxsize`` where a sample takes no memory.

    Raises:
        PlanError: Not even one sample fits, or ``headroom`` is out of its range.

    Example:
        >>> largest_micro_batch(MemoryModel(fixed_bytes=200, sample_bytes=10), 1000)
        72
    """
    if not 0 <= headroom < 1:
        raise PlanError(f"headroom must be at least 0 and below 1, not {headroom!r}.")
    usable_bytes = size_bytes * (1 - headroom)
    if model.bytes(1) > usable_bytes:
        raise PlanError(
            f"not even one sample fits: it needs {_readable(model.bytes(1))}, of which "
            f"{_readable(model.fixed_bytes)} for the model itself, and the device has "
            f"{_readable(size_bytes)} less {headroom:.0%} headroom. Use a smaller model or a "
            "device with more memory, or try amp."
        )
    if model.sample_bytes == 0:
        return sys.maxsize
    return min(sys.maxsize, int((usable_bytes - model.fixed_bytes) / model.sample_bytes))


def fit_memory(observed: Sequence[tuple[int, float]]) -> MemoryModel:
    """Fits p + q·μ to measured peaks, so that no peak lies above it; p ≥ 0 and q ≥ 0.

    Args:
        observed: ``(micro_batch, peak_bytes)`` of one device, of two sizes or more.

    Raises:
        PlanError: There are fewer than two sizes, or a value is out of its range.

    Example:
        >>> fit_memory([(8, 1080.0), (32, 1320.0)])
        MemoryModel(fixed_bytes=1000.0, sample_bytes=10.0)
    """
    if any(size < 1 or not 0 <= peak < math.inf for size, peak in observed):
        raise PlanError(f"peaks need a micro-batch ≥ 1 and finite bytes ≥ 0: {list(observed)}.")
    peaks: dict[int, float] = {}
    for size, peak in observed:
        peaks[size] = max(peak, peaks.get(size, 0.0))
    if len(peaks) < 2:
        raise PlanError(
            f"peaks of two micro-batch sizes are needed to tell the model's own memory from a "
            f"sample's, not of {len(peaks)}: measure one more size."
        )
    mean_size = sum(peaks) / len(peaks)
    mean_peak = sum(peaks.values()) / len(peaks)
    across = sum((size - mean_size) * (peak - mean_peak) for size, peak in peaks.items())
    slope = max(0.0, across / sum((size - mean_size) ** 2 for size in peaks))
    fixed = max(peak - slope * size for size, peak in peaks.items())
    if fixed < 0:
        return MemoryModel(fixed_bytes=0.0, sample_bytes=max(p / s for s, p in peaks.items()))
    return MemoryModel(fixed_bytes=fixed, sample_bytes=slope)


def shrink(known: MemoryModel | None, failed_micro_batch: int, headroom: float = 0.08) -> int:
    """Returns the cap of the micro-batch after one ran out of memory.

    Args:
        known: What a micro-batch is known to need; None (nothing measured yet) halves.
        failed_micro_batch: Samples of the micro-batch that did not fit.
        headroom: Share of what did not fit that stays free, at least 0 and below 1. Default 0.08.

    Returns:
        Samples, at least half of what failed, at most one less.

    Raises:
        PlanError: A single sample did not fit, or ``headroom`` is out of its range.

    Example:
        >>> shrink(None, 64), shrink(MemoryModel(fixed_bytes=200, sample_bytes=10), 80)
        (32, 72)
    """
    if failed_micro_batch < 2 or not 0 <= headroom < 1:
        raise PlanError(
            f"a micro-batch of {failed_micro_batch} cannot be made smaller (headroom {headroom}, "
            "at least 0 and below 1): use a smaller model or a device with more memory, or try amp."
        )
    half = failed_micro_batch // 2
    if known is None or known.sample_bytes == 0:
        return half
    usable_bytes = known.bytes(failed_micro_batch) * (1 - headroom)
    fits = math.floor((usable_bytes - known.fixed_bytes) / known.sample_bytes)
    return min(max(half, fits), failed_micro_batch - 1)


def _readable(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
