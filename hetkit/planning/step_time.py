r"""How long a device computes on a batch: t(b) = ⌈b/μ⌉·a + c·b, fitted from what was measured.

A step of *b* samples runs in ⌈b/μ⌉ micro-batches of at most μ samples. Each costs a fixed time
*a* (kernel launches, Python, the optimizer's bookkeeping) and each sample costs *c*::

    seconds │                          ╱
            │              ╱│a  ╱──────    one more micro-batch: the line jumps by a
            │        ╱─────  ╱
            │  ╱─────                      slope c per sample
          a │╱
            └──────────────────────────▶ samples b
              0       μ        2μ

"Batch proportional to speed" ignores *a*: on random devices its split is 10 % slower than the best
one (EVIDENCE.md §2). Only compute time carries a signal: the step's wall time is the same on every
rank, because the fast ones wait.

Whatever shape a device's times have, the planners ask of its model what `ComputeTime` lists; where
no line fits, `hetkit.planning.curve` gives one with bends.

**The fit.** Noise on a step is one-sided and has outliers (a garbage collection, another process),
and it is relative: a step twice as long is twice as uncertain. So the observations of each size
(b, k = ⌈b/μ⌉) are first reduced to their median m, and then the relative residuals
r = (a·k + c·b)/m − 1 are made small under Huber's loss [1]_, each weighted by the number of its
observations, by iteratively re-weighted least squares (weight 1 inside the bound, bound/|r|
outside, and no bound below 1 %) with a ≥ 0 and c > 0. Two sizes are met exactly, three or more in
the sense of the fit.

.. [1] P. J. Huber, "Robust estimation of a location parameter", Ann. Math. Stat. 35 (1964).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from hetkit.errors import PlanError

_HUBER = 1.345
"""Huber's constant for 95 % efficiency on normal residuals, in robust standard deviations."""

_INLIER = 0.01
"""Relative residual that makes no outlier of a size, however close the others lie."""

_SETTLED = 1e-5
"""Relative change of c at which the re-weighting ends: far below any measurement's noise."""

LEAST_SPREAD = 1.1
"""Sizes whose samples per micro-batch lie closer than this factor cannot tell a from c: between
them the noise on two medians is as large as what is to be told apart."""

LEAST_SLOPE = 0.05
"""Least c, as a share of the whole time per sample at the largest size that was measured: no
device is taken to be free per sample, however flat its few measurements look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One rank's compute time in one step.

    Args:
        batch: Samples that the rank computed, at least 1.
        micro_steps: Micro-batches that it took for them, at least 1.
        compute_s: Seconds of compute, without waiting, exchange and data.

    Raises:
        PlanError: A value is out of its range.

    Example:
        >>> Observation(batch=64, micro_steps=2, compute_s=0.08).compute_s
        0.08
    """

    batch: int
    micro_steps: int
    compute_s: float

    def __post_init__(self) -> None:
        if self.batch < 1 or not 1 <= self.micro_steps <= self.batch:
            raise PlanError(
                f"an observation needs at least 1 sample and 1 to {self.batch} micro-batches: "
                f"{self}."
            )
        if not 0 < self.compute_s < math.inf:
            raise PlanError(f"compute_s must be a finite number of seconds above 0: {self}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeMedian:
    """What is known of one size: the median of ``count`` observations, in seconds.

    Example:
        >>> medians([Observation(batch=8, micro_steps=1, compute_s=t) for t in (1.0, 3.0)])
        (SizeMedian(batch=8, micro_steps=1, seconds=2.0, count=2),)
    """

    batch: int
    micro_steps: int
    seconds: float
    count: int


class ComputeTime(Protocol):
    """What every model of a device's compute time answers; more samples never take less time.

    Example:
        >>> model: ComputeTime = StepTime(launch_s=0.5, sample_s=0.25)
        >>> model.samples_within(2.6, micro_batch=4), model.sample_s_at(6, micro_batch=4)
        (6, 0.25)
    """

    def seconds(self, batch: int, micro_batch: int) -> float:
        """Returns the seconds for ``batch`` samples in micro-batches of at most ``micro_batch``."""

    def seconds_in(self, batch: int, micro_steps: int) -> float:
        """Returns the seconds for ``batch`` samples, at least 1, in ``micro_steps`` passes."""

    def samples_within(self, step_s: float, micro_batch: int) -> int:
        """Returns the most samples that are done in ``step_s``; rounding can make it one off."""

    def sample_s_at(self, batch: int, micro_batch: int) -> float:
        """Returns what the last of ``batch`` samples costs, in seconds, launches left out."""

    def through(self, seen: SizeMedian) -> "ComputeTime":
        """Returns this model changed so that it agrees with ``seen``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A device's compute time: t(b) = ⌈b/μ⌉·a + c·b.

    Args:
        launch_s: The *a*: seconds per micro-batch, whatever its size; at least 0.
        sample_s: The *c*: seconds per sample; above 0.

    Raises:
        PlanError: A value is out of its range.

    Example:
        >>> device = StepTime(launch_s=0.5, sample_s=0.25)
        >>> device.seconds(6, micro_batch=4)      # two micro-batches
        2.5
    """

    launch_s: float
    sample_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.launch_s < math.inf or not 0 < self.sample_s < math.inf:
            raise PlanError(f"a step time needs launch_s ≥ 0 and sample_s > 0, finite: {self}.")

    def seconds(self, batch: int, micro_batch: int) -> float:
        """Returns the seconds for ``batch`` samples in micro-batches of at most ``micro_batch``.

        No samples take no time.
        """
        return -(-batch // micro_batch) * self.launch_s + self.sample_s * batch

    def seconds_in(self, batch: int, micro_steps: int) -> float:
        """Returns the seconds for ``batch`` samples in ``micro_steps`` passes."""
        return micro_steps * self.launch_s + self.sample_s * batch

    def samples_within(self, step_s: float, micro_batch: int) -> int:
        """Returns the most samples that are done in ``step_s``; rounding can make it one off."""
        full_s = self.launch_s + self.sample_s * micro_batch
        full = int(step_s / full_s)
        rest_s = step_s - full * full_s - self.launch_s
        return full * micro_batch + (int(rest_s / self.sample_s) if rest_s > 0 else 0)

    def sample_s_at(self, batch: int, micro_batch: int) -> float:
        """Returns what the last sample costs: *c*, whatever the size."""
        return self.sample_s

    def through(self, seen: SizeMedian) -> "StepTime":
        """Returns this model with its *c* changed so that it agrees with ``seen``.

        A card that throttles or shares its chip computes each sample slower and launches as
        before. Where the time is too short for that *a*, both are scaled.
        """
        launches_s = self.launch_s * seen.micro_steps
        least_s = LEAST_SLOPE * seen.seconds
        if seen.seconds - launches_s >= least_s:
            sample_s = (seen.seconds - launches_s) / seen.batch
            return StepTime(launch_s=self.launch_s, sample_s=sample_s)
        scale = seen.seconds / (launches_s + self.sample_s * seen.batch)
        return StepTime(launch_s=self.launch_s * scale, sample_s=self.sample_s * scale)


def medians(observations: Iterable[Observation]) -> tuple[SizeMedian, ...]:
    """Returns the median of each distinct (batch, micro_steps), in the order first seen."""
    by_size: dict[tuple[int, int], list[float]] = {}
    for seen in observations:
        by_size.setdefault((seen.batch, seen.micro_steps), []).append(seen.compute_s)
    return tuple(
        SizeMedian(batch=batch, micro_steps=steps, seconds=median(times), count=len(times))
        for (batch, steps), times in by_size.items()
    )


def tells_apart(sizes: Sequence[SizeMedian]) -> bool:
    """Whether *a* and *c* can be told apart: the samples per micro-batch differ by 10 % or more."""
    per_step = [size.batch / size.micro_steps for size in sizes]
    return max(per_step) >= LEAST_SPREAD * min(per_step)


def fit_step_time(observations: Iterable[Observation]) -> StepTime:
    """Fits t(b) = ⌈b/μ⌉·a + c·b; the module's text derives how.

    With one size, or sizes whose samples per micro-batch are within 10 % of each other, *a* and
    *c* cannot be told apart: then a = 0, that is, time is proportional to samples until a second
    size has been seen.

    Args:
        observations: Compute times of one device, of any sizes, in any order.

    Raises:
        PlanError: There is no observation.

    Example:
        >>> seen = [Observation(batch=b, micro_steps=1, compute_s=0.5 + 0.25 * b) for b in (2, 8)]
        >>> round(fit_step_time(seen).seconds(4, micro_batch=4), 6)
        1.5
    """
    return fit_medians(medians(observations))


def fit_medians(sizes: Sequence[SizeMedian]) -> StepTime:
    """Fits as `fit_step_time` does, from medians per size.

    Raises:
        PlanError: There is no size.
    """
    if not sizes:
        raise PlanError("a step time needs at least one observation; run a few steps first.")
    least_sample_s = LEAST_SLOPE * min(size.seconds / size.batch for size in sizes)
    free = tells_apart(sizes)
    rows = [(size.micro_steps / size.seconds, size.batch / size.seconds) for size in sizes]
    weights = [float(size.count) for size in sizes]
    launch_s, sample_s = _least_squares(rows, weights, least_sample_s, free)
    for _ in range(20 if len(sizes) > (2 if free else 1) else 0):
        off = [abs(launch_s * k + sample_s * b - 1) for k, b in rows]
        bound = max(_INLIER, _HUBER * 1.4826 * median(off))
        if max(off) <= bound:
            break
        huber = [w if r <= bound else w * bound / r for r, w in zip(off, weights, strict=True)]
        refined = _least_squares(rows, huber, least_sample_s, free)
        settled = math.isclose(refined[1], sample_s, rel_tol=_SETTLED)
        launch_s, sample_s = refined
        if settled:
            break
    return StepTime(launch_s=launch_s, sample_s=sample_s)


def _least_squares(
    rows: Sequence[tuple[float, float]],
    weights: Sequence[float],
    least_sample_s: float,
    free: bool,
) -> tuple[float, float]:
    """Minimises Σ w·(a·k/m + c·b/m − 1)² with a ≥ 0 (a = 0 if not ``free``) and c ≥ least.

    The problem is convex in two unknowns: when the free optimum breaks a bound, the optimum lies
    on that bound. ``rows`` are (k/m, b/m); returns (a, c).
    """
    kk = kb = bb = k1 = b1 = 0.0
    for (k, b), weight in zip(rows, weights, strict=True):
        wk, wb = weight * k, weight * b
        kk, kb, bb = kk + wk * k, kb + wk * b, bb + wb * b
        k1, b1 = k1 + wk, b1 + wb
    determinant = kk * bb - kb * kb
    if free and determinant > 0:
        launch_s = (k1 * bb - b1 * kb) / determinant
        sample_s = (b1 * kk - k1 * kb) / determinant
        if sample_s < least_sample_s:
            launch_s, sample_s = (k1 - kb * least_sample_s) / kk, least_sample_s
        if launch_s > 0:
            return launch_s, sample_s
    return 0.0, max(least_sample_s, b1 / bb)
