"""What is remembered of one rank's compute times, and how a change of its pace is noticed.

Per size (samples, micro-batches) the last 20 times are kept, of at most 4 sizes; the smallest and
the largest micro-batch among them stay, because they tell the fixed cost from the cost per sample
best. The sizes feed the fit of `hetkit.planning.curve`: a line, or a curve where three sizes or
more lie off every line by more than 5 % and by more than their own noise. It is then put through
the median of the size that runs now.

**Drift.** When a window's median is off by more than 5 %, and by more than its own noise, from
what was known, the device has changed its pace (heat, another user). What was measured at that
size is forgotten then, and the times at other sizes move to the new pace: each by the ratio of
the model that meets the new median to the old one. So one window is enough to follow a card that
throttles, without forgetting its fixed cost. A size never seen that is off is a bend of the
device's curve, not drift, where a rising curve goes through all that is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hetkit.planning.curve import fit_model
from hetkit.planning.step_time import (
    LEAST_SPREAD,
    ComputeTime,
    Observation,
    SizeMedian,
    tells_apart,
)

LEAST_TIMES = 3
"""Times of one size that are needed before its median is trusted."""

_TIMES_KEPT = 20
_SIZES_KEPT = 4
_DRIFT = 0.05
_SIGMAS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeTimes:
    """One rank's latest compute times at one size.

    Args:
        batch: Samples.
        micro_steps: Micro-batches that they were computed in.
        times: Seconds, the newest last; at least one.

    Attributes:
        middle: The median of the times.
        off: Each time's relative distance from it, the least first.

    Example:
        >>> SizeTimes(batch=8, micro_steps=1, times=(1.0, 1.2, 9.0)).middle.seconds
        1.2
    """

    batch: int
    micro_steps: int
    times: tuple[float, ...]
    middle: SizeMedian = field(init=False, compare=False, repr=False)
    off: tuple[float, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Both are asked for several times in every decision, and the times never change.
        middle = SizeMedian(
            batch=self.batch,
            micro_steps=self.micro_steps,
            seconds=median(self.times),
            count=len(self.times),
        )
        off = sorted(abs(time / middle.seconds - 1) for time in self.times)
        object.__setattr__(self, "middle", middle)
        object.__setattr__(self, "off", tuple(off))

    @property
    def pass_samples(self) -> float:
        """Samples of one micro-batch."""
        return self.batch / self.micro_steps

    @property
    def pass_s(self) -> float:
        """Seconds of one micro-batch, by the median."""
        return self.middle.seconds / self.micro_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """One rank's compute times by size, bounded; an empty one knows nothing.

    Args:
        sizes: What was measured at each size; the one seen last comes last.

    Example:
        >>> seen = [Observation(batch=10, micro_steps=1, compute_s=2.0)] * 5
        >>> Pace().take(seen).model()
        StepTime(launch_s=0.0, sample_s=0.2)
    """

    sizes: tuple[SizeTimes, ...] = ()

    def at(self, batch: int, micro_steps: int) -> SizeTimes | None:
        """Returns what was measured at a size; None when it was never seen."""
        for size in self.sizes:
            if (size.batch, size.micro_steps) == (batch, micro_steps):
                return size
        return None

    def error(self, count: int) -> float:
        """Returns the relative standard error of the median of ``count`` times: σ·√(π/2n).

        σ is the rank's relative noise, from all its sizes together: 1.4826 times the median
        absolute deviation from each size's median, so that a few outliers do not count, widened
        by n/(n − 0.8) per size for small n (Croux and Rousseeuw, "Time-efficient algorithms for
        two highly robust estimators of scale", 1992). √(π/2n) is the large-sample standard error
        of a median of normal values. 0 while no size has two times.
        """
        several = [size for size in self.sizes if len(size.times) > 1]
        if not several:
            return 0.0
        off = [distance for size in several for distance in size.off]
        sigma = 1.4826 * median(off) * len(off) / (len(off) - 0.8 * len(several))
        return sigma * math.sqrt(math.pi / (2 * count))

    def model(self, now: SizeTimes | None = None) -> ComputeTime | None:
        """Returns the fitted step time, put through the median of ``now``.

        Args:
            now: The size that runs at present. Default: the one seen last.

        Returns:
            None when nothing was measured.
        """
        if not self.sizes:
            return None
        trusted = [size for size in self.sizes if len(size.times) >= LEAST_TIMES] or self.sizes
        fewest = min(len(size.times) for size in trusted)
        fitted = fit_model(
            [size.middle for size in trusted], noise=lambda: _SIGMAS * self.error(fewest)
        )
        return fitted.through((now or self.sizes[-1]).middle)

    def take(self, observations: Sequence[Observation]) -> "Pace":
        """Returns the pace with a window's observations in it; the commonest size comes last."""
        by_size: dict[tuple[int, int], list[float]] = {}
        for seen in observations:
            by_size.setdefault((seen.batch, seen.micro_steps), []).append(seen.compute_s)
        pace = self
        for (batch, steps), times in sorted(by_size.items(), key=lambda item: len(item[1])):
            pace = pace._with(SizeTimes(batch=batch, micro_steps=steps, times=tuple(times)))
        return pace

    def _with(self, fresh: SizeTimes) -> "Pace":
        known = self.at(fresh.batch, fresh.micro_steps)
        others = tuple(size for size in self.sizes if size is not known)
        if self._drifted(known, fresh):
            return Pace(sizes=_bounded((*self._moved(others, fresh), fresh)))
        times = ((known.times if known else ()) + fresh.times)[-_TIMES_KEPT:]
        merged = SizeTimes(batch=fresh.batch, micro_steps=fresh.micro_steps, times=times)
        return Pace(sizes=_bounded((*others, merged)))

    def _drifted(self, known: SizeTimes | None, fresh: SizeTimes) -> bool:
        """Whether ``fresh`` contradicts what is known: its size's own times, else the model.

        A model of one size does not count: a second one that is off shows the fixed cost.
        """
        if len(fresh.times) < LEAST_TIMES:
            return False
        if known is not None and len(known.times) >= LEAST_TIMES:
            expected_s = known.middle.seconds
        else:
            model = self.model()
            if model is None or not tells_apart([size.middle for size in self.sizes]):
                return False
            if self._bends(fresh):
                return False
            expected_s = model.seconds_in(fresh.batch, fresh.micro_steps)
        off = abs(fresh.middle.seconds / expected_s - 1)
        return off > _DRIFT and off > math.sqrt(2) * _SIGMAS * self.error(len(fresh.times))

    def _bends(self, fresh: SizeTimes) -> bool:
        """Whether a size never seen may be off because the device's curve bends there.

        It may where a rising curve goes through all sizes, this one included. That the pace
        changed in the very window in which the size did is less likely; if it has, the sizes that
        come next tell.
        """
        x, y = fresh.pass_samples, fresh.pass_s
        return all(
            (size.pass_samples * LEAST_SPREAD <= x and size.pass_s < y)
            or (size.pass_samples >= x * LEAST_SPREAD and size.pass_s > y)
            for size in self.sizes
            if len(size.times) >= LEAST_TIMES
        )

    def _moved(self, others: Sequence[SizeTimes], fresh: SizeTimes) -> tuple[SizeTimes, ...]:
        old = self.model()
        if old is None:
            return ()
        new = old.through(fresh.middle)
        sizes = [(size, (size.batch, size.micro_steps)) for size in others]
        return tuple(_scaled(size, new.seconds_in(*at) / old.seconds_in(*at)) for size, at in sizes)


def _scaled(size: SizeTimes, factor: float) -> SizeTimes:
    times = tuple(time * factor for time in size.times)
    return SizeTimes(batch=size.batch, micro_steps=size.micro_steps, times=times)


def _bounded(sizes: tuple[SizeTimes, ...]) -> tuple[SizeTimes, ...]:
    """Drops the size seen longest ago that is neither the least nor the largest micro-batch."""
    if len(sizes) <= _SIZES_KEPT:
        return sizes
    per_step = [size.pass_samples for size in sizes]
    keep = (min(per_step), max(per_step))
    between = [i for i, value in enumerate(per_step[:-1]) if value not in keep]
    drop = between[0] if between else 0
    return sizes[:drop] + sizes[drop + 1 :]
