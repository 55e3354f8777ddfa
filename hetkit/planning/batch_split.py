r"""How many samples each rank computes, so that a step takes as little time as it can.

A synchronous step ends when its slowest rank does, so the best split solves, over integers,

    min  max_i t_i(b_i)     with  Σ b_i = B,   floor_i ≤ b_i ≤ cap_i,

with t_i of `hetkit.planning.step_time`. Each t_i grows with b_i, so rank *i* asks for its samples
at the times t_i(1) < t_i(2) < … : the sorted finish times of all ranks are one queue, and the
optimum serves the first B of it::

    rank 0   ┼──┼──┼──┼──┼──┼──┼──│──┼──        fast: many finish times before τ
    rank 1   ┼──────┼──────┼──────│┼──────      slow: few
                                  τ             the B-th finish time of all: the step

So τ is the least time within which the ranks finish B samples together; the search for it is
`hetkit.planning.finish_queue`'s. What comes out is not only optimal in its maximum, but even: no
rank, the slowest or another, has a sample that a different rank would have finished earlier.

Without bounds and rounding, τ* = (B + Σ a_i/c_i)/(Σ 1/c_i) (EVIDENCE.md §2). No integer split
comes closer to it than one sample of the coarsest rank: max_i c_i/τ is the *imbalance floor*.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from hetkit.errors import PlanError
from hetkit.planning.finish_queue import Finish, Seat, serve
from hetkit.planning.leftover import serve_with_rest
from hetkit.planning.step_time import ComputeTime


def even_split(total: int, n: int) -> tuple[int, ...]:
    """Splits ``total`` samples over ``n`` ranks as evenly as integers allow, the first get more.

    Raises:
        PlanError: ``n`` is below 1 or ``total`` below 0.

    Example:
        >>> even_split(10, 4)
        (3, 3, 2, 2)
    """
    if n < 1 or total < 0:
        raise PlanError(f"cannot split {total} samples over {n} ranks: give ≥ 0 and ≥ 1.")
    share, rest = divmod(total, n)
    return tuple(share + (rank < rest) for rank in range(n))


def ratio_split(ratios: Sequence[float], total: int) -> tuple[int, ...]:
    """Splits ``total`` samples in the given ratios, by the method of largest remainders.

    Each rank gets the whole part of its exact quota; the samples left go to the largest remainders,
    at a tie to the lowest rank. Quotas are exact fractions, so every rank of every machine comes
    to the same split: it also divides an epoch's smaller last batch by the plan's batches.

    Args:
        ratios: One number of at least 0 per rank, of any scale; one at least is above 0.
        total: Samples to split, at least 0.

    Raises:
        PlanError: A ratio is negative or not finite, all are 0, or ``total`` is negative.

    Example:
        >>> ratio_split([2.3, 1], 100)
        (70, 30)
    """
    bad = [r for r in ratios if not 0 <= r < math.inf]
    if bad or not any(ratios) or total < 0:
        raise PlanError(
            f"cannot split {total} samples in ratios {tuple(ratios)}: give finite numbers of at "
            "least 0, one of them above 0, and at least 0 samples."
        )
    exact = [Fraction(ratio) for ratio in ratios]
    whole = sum(exact)
    quotas = [ratio * total / whole for ratio in exact]
    split = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(split)), key=lambda rank: (split[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(split)]:
        split[rank] += 1
    return tuple(split)


def split_batch(
    models: Sequence[Finish],
    total: int,
    *,
    micro_batches: Sequence[int],
    floors: Sequence[int] | None = None,
    caps: Sequence[int] | None = None,
    granularity: int = 1,
) -> tuple[int, ...]:
    """Returns the split of ``total`` samples with the shortest step, exactly.

    Args:
        models: Compute time of each rank, of any shape.
        total: Samples in the step.
        micro_batches: Largest micro-batch of each rank, at least 1.
        floors: Least samples of each rank. Default: 0, so a rank too slow to help gets none.
        caps: Most samples of each rank. Default: no bound, ranks accumulate gradients.
        granularity: Batches are multiples of so many samples (8 suits tensor cores). Where
            ``total`` is none, one rank takes what is left over on top of its multiple: the one
            with which the step is shortest. Default 1.

    Raises:
        PlanError: The lists differ in length, or no split satisfies the bounds; the message says
            what would.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> fast, slow = StepTime(launch_s=0.0, sample_s=1.0), StepTime(launch_s=0.0, sample_s=2.0)
        >>> split_batch([fast, slow], 90, micro_batches=[90, 90])
        (60, 30)
        >>> split_batch([fast, slow], 90, micro_batches=[90, 90], caps=[50, 90])
        (50, 40)
        >>> split_batch([fast, slow], 90, micro_batches=[90, 90], granularity=8)
        (64, 26)
    """
    n = len(models)
    floors = [0] * n if floors is None else floors
    caps = [max(total, floor) for floor in floors] if caps is None else caps
    _check(n, total, micro_batches, floors, caps, granularity)
    rows = zip(models, micro_batches, floors, caps, strict=True)
    seats = [Seat(*row, unit=granularity) for row in rows]
    units, rest = divmod(total, granularity)
    if rest:
        split = serve_with_rest(seats, units, rest)
        if split is None:
            why = _refused([replace(seats[0], rest=rest), *seats[1:]], units)
            raise PlanError(f"with the {rest} samples that are left over on one rank, {why}")
        return split
    refused = _refused(seats, units)
    if refused:
        raise PlanError(refused)
    return serve(seats, units)


def _check(
    n: int,
    total: int,
    micro_batches: Sequence[int],
    floors: Sequence[int],
    caps: Sequence[int],
    granularity: int,
) -> None:
    if n == 0 or not n == len(micro_batches) == len(floors) == len(caps):
        raise PlanError(
            f"give one value per rank, for at least one: {n} models, {len(micro_batches)} "
            f"micro_batches, {len(floors)} floors, {len(caps)} caps."
        )
    if min(micro_batches) < 1 or min(floors) < 0:
        raise PlanError(
            f"micro_batches must be ≥ 1 and floors ≥ 0: {tuple(micro_batches)}, {tuple(floors)}."
        )
    if granularity < 1:
        raise PlanError(f"granularity must be at least 1 sample, not {granularity}.")
    for rank, (floor, cap) in enumerate(zip(floors, caps, strict=True)):
        if floor > cap:
            raise PlanError(
                f"rank {rank} must take at least {floor} samples but can take at most {cap}: "
                "lower its floor, raise its cap, or leave the device out."
            )
    if not sum(floors) <= total <= sum(caps):
        nearest = sum(floors) if total < sum(floors) else sum(caps)
        raise PlanError(
            f"{total} samples do not fit the bounds: all ranks together take {sum(floors)} to "
            f"{sum(caps)}. Choose a global batch in that range, the nearest is {nearest}, or raise "
            "the caps with smaller micro-batches or more devices."
        )


def _refused(seats: Sequence[Seat], units: int) -> str | None:
    """Returns why whole units cannot satisfy the bounds, and what would; None where they can."""
    unit = seats[0].unit
    for rank, seat in enumerate(seats):
        if seat.least > seat.most:
            return (
                f"rank {rank} has no batch between {seat.floor} and {seat.cap} samples in units of "
                f"{unit}: use granularity=1, lower its floor, or raise its cap to "
                f"{seat.least * unit + seat.rest}."
            )
    least, most = sum(seat.least for seat in seats), sum(seat.most for seat in seats)
    if least <= units <= most:
        return None
    rest = sum(seat.rest for seat in seats)
    return (
        f"{units * unit + rest} samples do not fit the bounds in units of {unit}: all ranks "
        f"together take {least * unit} to {most * unit} in whole units. Choose a global batch in "
        "that range, change the floors and caps to multiples of the unit, or use granularity=1."
    )


def step_seconds(
    models: Sequence[Finish], batches: Sequence[int], micro_batches: Sequence[int]
) -> float:
    """Returns how long the slowest rank computes, in seconds: max_i t_i(b_i).

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> device = StepTime(launch_s=0.0, sample_s=0.5)
        >>> step_seconds([device, device], [4, 6], [8, 8])
        3.0
    """
    rows = zip(models, batches, micro_batches, strict=True)
    return max(model.seconds(batch, micro) for model, batch, micro in rows)


def imbalance_floor(
    models: Sequence[ComputeTime],
    batches: Sequence[int],
    micro_batches: Sequence[int] | None = None,
) -> float:
    """Returns the spread of compute times below which no integer split is sure to come.

    One sample more or less on rank *i* moves its finish by c_i (on a curve, by its slope there), so
    the spread cannot be pressed below max_i c_i/τ over the ranks with work (τ the step's compute
    time). A share of τ; 0 when no rank has work.

    Args:
        models: Step time of each rank.
        batches: Samples of each rank.
        micro_batches: Largest micro-batch of each rank. Default: each computes in one piece.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> imbalance_floor([StepTime(launch_s=0.0, sample_s=0.5)] * 2, [10, 10])
        0.1
    """
    micro_batches = [max(1, batch) for batch in batches] if micro_batches is None else micro_batches
    step_s = step_seconds(models, batches, micro_batches)
    rows = zip(models, batches, micro_batches, strict=True)
    coarse = [model.sample_s_at(batch, micro) for model, batch, micro in rows if batch > 0]
    return max(coarse) / step_s if coarse else 0.0


def compute_spread(compute_s: Sequence[float | None]) -> float | None:
    """Returns (max − min)/max of the ranks' compute times; None when no rank has work.

    Args:
        compute_s: Seconds per rank; ranks without work (0) or without a reading (None) are left
            out.

    Example:
        >>> compute_spread([1.0, 0.75, 0.0])
        0.25
    """
    working = [seconds for seconds in compute_s if seconds]
    return (max(working) - min(working)) / max(working) if working else None
