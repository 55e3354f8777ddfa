r"""A device whose times no line fits: a rising curve through what was measured, per pass.

An affine model missed the worst card by 11.8 % in the best open system that was measured
(EVIDENCE.md §2): kernels fill a card in waves, caches overflow, another algorithm takes over. Then
one pass over x samples takes g(x), a rising line with bends at the sizes that were measured::

    seconds │              ╱      beyond the last size: its slope goes on
            │            ●╱
            │      ●────╯         bends at what was measured
            │    ╱
          a │●──╯                 before the first: its slope goes back, to a ≥ 0
            └──────────────────▶ samples of one pass

A step of *b* samples runs in k = ⌈b/μ⌉ even passes, and takes t(b) = k·g(b/k). Where a curve that
steepens makes more and smaller passes cheaper than fewer, t keeps to the time of the k − 1 full
passes before: more samples never take less time, which is what the split relies on.

**The fit.** The bends are the medians, those within 10 % of each other's size taken together. They
are made to rise by isotonic regression (pool adjacent violators [1]_) under relative weights, and
by at least 5 % of the least time per sample: no device is free per sample.

**When.** Only where three sizes or more are known and the line leaves one of them off by more than
5 %: with fewer, or less, the line is the better guess for sizes that were not measured.

.. [1] R. E. Barlow, D. J. Bartholomew, J. M. Bremner, H. D. Brunk, "Statistical Inference under
   Order Restrictions", Wiley (1972).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetkit.errors import PlanError
from hetkit.planning.step_time import (
    LEAST_SLOPE,
    LEAST_SPREAD,
    ComputeTime,
    SizeMedian,
    fit_medians,
)

_TOLERANCE = 0.05
"""The relative residual that a line may leave before a curve takes its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """A device's compute time as a rising curve: t(b) = k·g(b/k) in k = ⌈b/μ⌉ even passes.

    Args:
        sizes: Samples of one pass at the bends of g, rising from 0; two or more.
        times: Seconds of such a pass, rising from at least 0.

    Raises:
        PlanError: The lists differ in length, or do not rise.

    Example:
        >>> device = StepCurve(sizes=(0, 10, 20), times=(1.0, 2.0, 5.0))
        >>> [device.seconds(b, micro_batch=20) for b in (0, 5, 15, 40)]
        [0.0, 1.5, 3.5, 10.0]
    """

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for row in (self.sizes, self.times) for a, b in pairwise(row))
        finite = all(0 <= value < math.inf for value in (*self.sizes, *self.times))
        if not (1 < len(self.sizes) == len(self.times) and rises and finite and not self.sizes[0]):
            raise PlanError(
                "a curve needs two bends or more, sizes that rise from 0 and times that rise from "
                f"at least 0, finite: {self.sizes}, {self.times}."
            )

    def seconds(self, batch: int, micro_batch: int) -> float:
        """Returns the seconds for ``batch`` samples in micro-batches of at most ``micro_batch``.

        No samples take no time.
        """
        if batch < 1:
            return 0.0
        passes = -(-batch // micro_batch)
        within_s = self.seconds_in(batch, passes)
        return max(within_s, (passes - 1) * self._pass_s(micro_batch)) if passes > 1 else within_s

    def seconds_in(self, batch: int, micro_steps: int) -> float:
        """Returns the seconds for ``batch`` samples in ``micro_steps`` even passes."""
        return micro_steps * self._pass_s(batch / micro_steps)

    def samples_within(self, step_s: float, micro_batch: int) -> int:
        """Returns the most samples that are done in ``step_s``; rounding can make it one off."""
        full = int(step_s / self._pass_s(micro_batch))
        passes = full + 1
        batch = int(passes * self._pass_samples(step_s / passes))
        return min(max(batch, full * micro_batch), passes * micro_batch)

    def sample_s_at(self, batch: int, micro_batch: int) -> float:
        """Returns what the last of ``batch`` samples costs: the slope of g left of that size."""
        end = self._bend(batch / max(1, -(-batch // micro_batch)))
        rise_s = self.times[end] - self.times[end - 1]
        return rise_s / (self.sizes[end] - self.sizes[end - 1])

    def through(self, seen: SizeMedian) -> "StepCurve":
        """Returns this curve scaled as a whole so that it agrees with ``seen``.

        One observation cannot tell which part of the curve has changed.
        """
        scale = seen.seconds / self.seconds_in(seen.batch, seen.micro_steps)
        return StepCurve(sizes=self.sizes, times=tuple(time * scale for time in self.times))

    def _bend(self, samples: float) -> int:
        """Returns which bend ends the piece that ``samples`` lies on; the last goes on for ever."""
        return bisect_left(self.sizes, samples, 1, len(self.sizes) - 1)

    def _pass_s(self, samples: float) -> float:
        end = self._bend(samples)
        x, y, x_end, y_end = *self._point(end - 1), *self._point(end)
        return y + (y_end - y) * (samples - x) / (x_end - x)

    def _pass_samples(self, pass_s: float) -> float:
        end = bisect_left(self.times, pass_s, 1, len(self.times) - 1)
        x, y, x_end, y_end = *self._point(end - 1), *self._point(end)
        return max(0.0, x + (x_end - x) * (pass_s - y) / (y_end - y))

    def _point(self, bend: int) -> tuple[float, float]:
        return self.sizes[bend], self.times[bend]


@dataclass(frozen=True, slots=True)
class _Knot:
    """A size of one pass, its time, and how much it weighs; several that were pooled are one."""

    samples: float
    seconds: float
    weight: float

    def pooled(self, other: "_Knot") -> "_Knot":
        weight = self.weight + other.weight
        return _Knot(
            (self.samples * self.weight + other.samples * other.weight) / weight,
            (self.seconds * self.weight + other.seconds * other.weight) / weight,
            weight,
        )


def fit_model(sizes: Sequence[SizeMedian], noise: Callable[[], float] = lambda: 0.0) -> ComputeTime:
    """Fits the line, or the curve where the line is off: the module's text says when.

    Args:
        sizes: Medians of one device, of any sizes, in any order.
        noise: Relative error of the medians that is nothing to bend a curve for; asked only where
            the line is off. Default: 0.

    Raises:
        PlanError: There is no size.

    Example:
        >>> seen = [
        ...     SizeMedian(batch=b, micro_steps=1, seconds=s, count=5)
        ...     for b, s in [(8, 1.0), (16, 2.0), (32, 6.0)]
        ... ]
        >>> fit_model(seen)
        StepCurve(sizes=(0.0, 8.0, 16.0, 32.0), times=(0.0, 1.0, 2.0, 6.0))
    """
    line = fit_medians(sizes)
    off = max(abs(line.seconds_in(s.batch, s.micro_steps) / s.seconds - 1) for s in sizes)
    if off <= _TOLERANCE:
        return line
    knots = _knots(sizes)
    return line if len(knots) < 3 or off <= noise() else _rising(knots)


def fit_curve(sizes: Sequence[SizeMedian]) -> StepCurve:
    """Fits the rising curve of the module's text, whatever a line would leave.

    Raises:
        PlanError: There is no size.
    """
    if not sizes:
        raise PlanError("a curve needs at least one observation; run a few steps first.")
    return _rising(_knots(sizes))


def _rising(knots: Sequence[_Knot]) -> StepCurve:
    """Returns the curve through the knots, once they are made to rise by the least slope."""
    least = LEAST_SLOPE * min(knot.seconds / knot.samples for knot in knots)
    above = [knot.seconds - least * knot.samples for knot in knots]
    rising = _isotonic(above, [knot.weight / knot.seconds**2 for knot in knots])
    xs = [knot.samples for knot in knots]
    ys = [value + least * x for value, x in zip(rising, xs, strict=True)]
    slope = (ys[1] - ys[0]) / (xs[1] - xs[0]) if len(xs) > 1 else ys[0] / xs[0]
    return StepCurve(sizes=(0.0, *xs), times=(max(0.0, ys[0] - slope * xs[0]), *ys))


def _knots(sizes: Sequence[SizeMedian]) -> list[_Knot]:
    """Returns the sizes of one pass, rising; between two that are close, noise looks like slope."""
    knots: list[_Knot] = []
    first = 0.0
    for samples, size in sorted(((s.batch / s.micro_steps, s) for s in sizes), key=lambda r: r[0]):
        knot = _Knot(samples, size.seconds / size.micro_steps, size.count)
        if knots and samples < LEAST_SPREAD * first:
            knots[-1] = knots[-1].pooled(knot)
        else:
            knots.append(knot)
            first = samples
    return knots


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Returns the rising values closest to ``values`` in weighted squares."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            whole = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / whole, whole, count + pool[2])
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]
