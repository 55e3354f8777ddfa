r"""The split where the exchange overlaps with the backward pass: T(b) of DESIGN.md §6.

DDP exchanges a bucket as soon as all ranks have it ready, one after the other, while the backward
pass computes the next. With rank *i* ready with bucket k at r_ik(b) = α_ik + γ_ik·b, and C_k the
seconds of its exchange::

    rank 0   ████████1███████2███████3            ready with bucket 1, 2, 3
    rank 1   ██████████████1███████2███████3
    link                   ═══C1═══▶══C2══▶══C3══▶optimizer
                           ↑ the last rank's bucket 1

the step lasts

    T(b) = max_k [ max_i r_ik(b_i) + Σ_{j≥k} C_j ] + t_opt,

because whatever holds bucket k up, all exchanges from k on are still to come. The two maxima may
change places: rank *i* alone makes the step last e_i(b_i) = max_k [r_ik(b_i) + Σ_{j≥k} C_j], which
rises with b_i. So the best split is that of `hetkit.planning.batch_split` with e_i in place of the
compute time; in it, min_k ⌊(τ − Σ_{j≥k} C_j − α_ik)/γ_ik⌋ samples are done within τ. It differs
from the split of the compute alone where ranks differ in which bucket holds them up.

With gradient accumulation only the last of the p even passes exchanges; the passes before it last
as long as the last bucket takes to be ready. A rank without samples hands in zeros at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hetkit.errors import PlanError
from hetkit.planning.batch_split import split_batch, step_seconds
from hetkit.planning.step_time import ComputeTime


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTimes:
    """When one rank has its buckets ready in a pass of b samples: α_k + γ_k·b after its start.

    Args:
        fixed_s: The α of each bucket, in the order of the exchange, in seconds; at least 0.
        sample_s: The γ of each bucket, in seconds per sample; above 0, the last one's largest.

    Raises:
        PlanError: The lists are empty or differ in length, or a value is out of its range.

    Example:
        >>> rank = BucketTimes(fixed_s=(0.0, 0.0), sample_s=(1.0, 2.0))
        >>> [rank.ready_s(batch, micro_batch=4) for batch in (0, 3, 6)]
        [(0.0, 0.0), (3.0, 6.0), (9.0, 12.0)]
    """

    fixed_s: tuple[float, ...]
    sample_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.fixed_s) == len(self.sample_s):
            raise PlanError(
                f"give one fixed_s and one sample_s per bucket, for at least one: {self}."
            )
        positive = all(0 <= a < math.inf for a in self.fixed_s) and min(self.sample_s) > 0
        if not positive or not max(self.sample_s) == self.sample_s[-1] < math.inf:
            raise PlanError(
                "buckets need fixed_s ≥ 0 and sample_s > 0, finite, and the last to be ready has "
                f"the largest sample_s: {self}."
            )

    @classmethod
    def along(
        cls, model: ComputeTime, shares: Sequence[float], *, batch: int, micro_batch: int
    ) -> "BucketTimes":
        """Returns the times of buckets that are ready after given shares of a pass's compute.

        Args:
            model: Compute time of the rank; a curve counts as its tangent at the size.
            shares: Share of a pass after which each bucket is ready, above 0 and at most 1,
                rising; measured at any size.
            batch: Samples of the rank about which the split is looked for, at least 1.
            micro_batch: Largest micro-batch of the rank.

        Example:
            >>> from hetkit.planning.step_time import StepTime
            >>> device = StepTime(launch_s=2.0, sample_s=1.0)
            >>> BucketTimes.along(device, [0.5, 1.0], batch=8, micro_batch=8)
            BucketTimes(fixed_s=(1.0, 2.0), sample_s=(0.5, 1.0))
        """
        passes = -(-batch // micro_batch)
        sample_s = model.sample_s_at(batch, micro_batch)
        fixed_s = max(0.0, (model.seconds(batch, micro_batch) - sample_s * batch) / passes)
        return cls(
            fixed_s=tuple(share * fixed_s for share in shares),
            sample_s=tuple(share * sample_s for share in shares),
        )

    def ready_s(self, batch: int, micro_batch: int) -> tuple[float, ...]:
        """Returns when each bucket is ready, in seconds after the start of the step's compute."""
        if batch < 1:
            return (0.0,) * len(self.fixed_s)
        passes = -(-batch // micro_batch)
        size = batch / passes
        before_s = (passes - 1) * (self.fixed_s[-1] + self.sample_s[-1] * size)
        rows = zip(self.fixed_s, self.sample_s, strict=True)
        return tuple(before_s + fixed + sample * size for fixed, sample in rows)


@dataclass(frozen=True, slots=True)
class _Held:
    """A rank as what it makes the step last: e(b) = max_k [r_k(b) + the exchanges from k on].

    ``rows`` are, per bucket, γ_k and α_k + the exchanges from k on; those after a pass without
    samples are ``idle_s``; each pass before the last takes ``fixed_s`` + ``sample_s``·its samples.
    """

    rows: tuple[tuple[float, float], ...]
    idle_s: float
    fixed_s: float
    sample_s: float

    def seconds(self, batch: int, micro_batch: int) -> float:
        if batch < 1:
            return self.idle_s
        passes = -(-batch // micro_batch)
        size = batch / passes
        before_s = (passes - 1) * (self.fixed_s + self.sample_s * size)
        return before_s + max([sample * size + fixed for sample, fixed in self.rows])

    def samples_within(self, step_s: float, micro_batch: int) -> int:
        """Returns the most samples that let the step end in ``step_s``; it may be one off.

        Each full pass but the last adds the time of a whole one, so their number follows by one
        division; in the pass after them, each bucket allows so many samples, and the least counts.
        """
        beyond_s = step_s - self.seconds(micro_batch, micro_batch)
        pass_s = self.fixed_s + self.sample_s * micro_batch
        full = int(beyond_s / pass_s) + 1 if beyond_s >= 0 else 0
        passes = full + 1
        rest_s, before_s = step_s - full * self.fixed_s, full * self.sample_s
        allowed = min([(rest_s - fixed) / (before_s + sample) for sample, fixed in self.rows])
        return min(max(int(passes * allowed), full * micro_batch), passes * micro_batch)


def split_overlapped(
    ranks: Sequence[BucketTimes],
    total: int,
    *,
    exchange_s: Sequence[float],
    micro_batches: Sequence[int],
    floors: Sequence[int] | None = None,
    caps: Sequence[int] | None = None,
    granularity: int = 1,
) -> tuple[int, ...]:
    """Returns the split of ``total`` samples with the shortest overlapped step, exactly.

    Args:
        ranks: When each rank has its buckets ready.
        total: Samples in the step.
        exchange_s: Seconds that each bucket's exchange takes, in order.
        micro_batches: Largest micro-batch of each rank, at least 1.
        floors: Least samples of each rank. Default: 0.
        caps: Most samples of each rank. Default: no bound.
        granularity: As in `hetkit.planning.batch_split.split_batch`. Default 1.

    Raises:
        PlanError: As `split_batch` does; or the ranks differ in their number of buckets.

    Example:
        >>> fast, slow = (BucketTimes(fixed_s=(0, 0), sample_s=(c / 2, c)) for c in (1.0, 2.0))
        >>> split_overlapped([fast, slow], 90, exchange_s=[10.0, 5.0], micro_batches=[90, 90])
        (60, 30)
    """
    return split_batch(
        _held(ranks, exchange_s),
        total,
        micro_batches=micro_batches,
        floors=floors,
        caps=caps,
        granularity=granularity,
    )


def overlapped_seconds(
    ranks: Sequence[BucketTimes],
    batches: Sequence[int],
    *,
    exchange_s: Sequence[float],
    micro_batches: Sequence[int],
    optimizer_s: float = 0.0,
) -> float:
    """Returns how long the step lasts: T(b) of the module's text, in seconds.

    Raises:
        PlanError: The ranks differ in their number of buckets.

    Example:
        >>> rank = BucketTimes(fixed_s=(0.0, 0.0), sample_s=(1.0, 2.0))
        >>> overlapped_seconds([rank], [3], exchange_s=[4.0, 0.5], micro_batches=[4])
        7.5
    """
    return step_seconds(_held(ranks, exchange_s), batches, micro_batches) + optimizer_s


def _held(ranks: Sequence[BucketTimes], exchange_s: Sequence[float]) -> list[_Held]:
    wrong = [rank for rank, times in enumerate(ranks) if len(times.fixed_s) != len(exchange_s)]
    if wrong or not all(0 <= seconds < math.inf for seconds in exchange_s):
        raise PlanError(
            f"give every rank one time per bucket, and exchanges of finite seconds ≥ 0: "
            f"{len(exchange_s)} exchanges {tuple(exchange_s)}, another number at ranks {wrong}."
        )
    tails_s = tuple(accumulate(reversed(exchange_s)))[::-1]
    return [
        _Held(
            rows=tuple(
                (sample, fixed + tail)
                for sample, fixed, tail in zip(times.sample_s, times.fixed_s, tails_s, strict=True)
            ),
            idle_s=tails_s[0],
            fixed_s=times.fixed_s[-1],
            sample_s=times.sample_s[-1],
        )
        for times in ranks
    ]
