r"""How many samples each rank computes, so that a step takes as little time as it can.

A synchronous step ends when its slowest rank does, so the best split solves, over integers,

    min  max_i t_i(b_i)     with  Σ b_i = B,   floor_i ≤ b_i ≤ cap_i,

with t_i of `hetkit.planning.step_time`. Each t_i grows with b_i, so rank *i* asks for its samples
at the times t_i(1) < t_i(2) < … : the sorted finish times of all ranks are one queue, and the
optimum serves the first B of it::

    rank 0   ┼──┼──┼──┼──┼──┼──┼──│──┼──        fast: many finish times before τ
    rank 1   ┼──────┼──────┼──────│┼──────      slow: few
                                  τ             the B-th finish time of all: the step

So τ is the least time within which the ranks finish B samples together, found by bisection on
S(τ) = Σ_i max{b : t_i(b) ≤ τ}; the few samples that S(τ) has above B are taken from whoever
finishes last. What comes out is not only optimal in its maximum, but even: no rank, the slowest or
another, has a sample that a different rank would have finished earlier.

Without bounds and rounding, τ* = (B + Σ a_i/c_i)/(Σ 1/c_i) (EVIDENCE.md §2). No integer split
comes closer to it than one sample of the coarsest rank: max_i c_i/τ is the *imbalance floor*.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hetkit.errors import PlanError
from hetkit.planning.step_time import StepTime


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


@dataclass(frozen=True, slots=True)
class _Seat:
    """One rank in the search: its step time and its bounds."""

    model: StepTime
    micro_batch: int
    floor: int
    cap: int

    def seconds(self, batch: int) -> float:
        return self.model.seconds(batch, self.micro_batch)

    def within(self, step_s: float) -> int:
        """Returns the most samples that are done in ``step_s``, inside the bounds.

        The rounding of floats can make it one off; `_settle` mends that.
        """
        launch_s, sample_s = self.model.launch_s, self.model.sample_s
        full_s = launch_s + sample_s * self.micro_batch
        full = int(step_s / full_s)
        batch = full * self.micro_batch
        rest_s = step_s - full * full_s - launch_s
        if rest_s > 0:
            batch += int(rest_s / sample_s)
        return self.floor if batch < self.floor else self.cap if batch > self.cap else batch


def split_batch(
    models: Sequence[StepTime],
    total: int,
    *,
    micro_batches: Sequence[int],
    floors: Sequence[int] | None = None,
    caps: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Returns the split of ``total`` samples with the shortest step, exactly.

    Args:
        models: Step time of each rank.
        total: Samples in the step.
        micro_batches: Largest micro-batch of each rank, at least 1.
        floors: Least samples of each rank. Default: 0, so a rank too slow to help gets none.
        caps: Most samples of each rank. Default: no bound, ranks accumulate gradients.

    Raises:
        PlanError: The lists differ in length, or no split satisfies the bounds; the message says
            what would.

    Example:
        >>> fast, slow = StepTime(launch_s=0.0, sample_s=1.0), StepTime(launch_s=0.0, sample_s=2.0)
        >>> split_batch([fast, slow], 90, micro_batches=[90, 90])
        (60, 30)
        >>> split_batch([fast, slow], 90, micro_batches=[90, 90], caps=[50, 90])
        (50, 40)
    """
    seats = _seat(models, total, micro_batches, floors, caps)
    split = _finished_together(seats, total)
    _trim(seats, split, sum(split) - total)
    _settle(seats, split)
    return tuple(split)


def _seat(
    models: Sequence[StepTime],
    total: int,
    micro_batches: Sequence[int],
    floors: Sequence[int] | None,
    caps: Sequence[int] | None,
) -> list[_Seat]:
    n = len(models)
    floors = [0] * n if floors is None else floors
    caps = [max(total, floor) for floor in floors] if caps is None else caps
    if n == 0 or not n == len(micro_batches) == len(floors) == len(caps):
        raise PlanError(
            f"give one value per rank, for at least one: {n} models, {len(micro_batches)} "
            f"micro_batches, {len(floors)} floors, {len(caps)} caps."
        )
    if min(micro_batches) < 1 or min(floors) < 0:
        raise PlanError(
            f"micro_batches must be ≥ 1 and floors ≥ 0: {tuple(micro_batches)}, {tuple(floors)}."
        )
    for rank, (floor, cap) in enumerate(zip(floors, caps, strict=True)):
        if floor > cap:
            raise PlanError(
                f"rank {rank} must take at least {floor} samples but can take at most {cap}: "
                "lower its floor, raise its cap, or leave the device out."
            )
    if not sum(floors) <= total <= sum(caps):
        raise PlanError(
            f"{total} samples do not fit the bounds: all ranks together take {sum(floors)} to "
            f"{sum(caps)}. Choose a global batch in that range, or raise the caps with smaller "
            "micro-batches or more devices."
        )
    return [_Seat(*row) for row in zip(models, micro_batches, floors, caps, strict=True)]


def _finished_together(seats: Sequence[_Seat], total: int) -> list[int]:
    """Returns what the ranks finish within a step time τ: ``total`` samples or few more.

    S(τ) is nearly a line, so every other probe is by false position, which alone would creep when
    S has a bend; the probes between halve the bracket.
    """
    low_s, low_count = 0.0, sum(seat.floor for seat in seats)
    high_s = max(seat.seconds(min(seat.cap, total)) for seat in seats)
    best = [seat.cap for seat in seats]
    high_count = sum(best)
    for probe in range(64):
        if high_count - total <= len(seats):
            break
        share = (total - low_count) / (high_count - low_count) if probe % 2 else 0.5
        step_s = low_s + share * (high_s - low_s)
        split = [seat.within(step_s) for seat in seats]
        count = sum(split)
        if count >= total:
            high_s, high_count, best = step_s, count, split
        else:
            low_s, low_count = step_s, count
    return best


def _trim(seats: Sequence[_Seat], split: list[int], surplus: int) -> None:
    """Takes ``surplus`` samples, each from the rank that finishes last; at a tie the higher."""
    queue = [
        (-seat.seconds(split[rank]), -rank)
        for rank, seat in enumerate(seats)
        if split[rank] > seat.floor
    ]
    heapq.heapify(queue)
    for _ in range(surplus):
        _, key = queue[0]
        rank, seat = -key, seats[-key]
        split[rank] -= 1
        if split[rank] > seat.floor:
            heapq.heapreplace(queue, (-seat.seconds(split[rank]), key))
        else:
            heapq.heappop(queue)


def _settle(seats: Sequence[_Seat], split: list[int]) -> None:
    """Moves samples from the last to finish to who would finish them earlier, until none is."""
    while True:
        ranks = list(zip(seats, split, range(len(split)), strict=True))
        givers = [(seat.seconds(b), rank) for seat, b, rank in ranks if b > seat.floor]
        takers = [(seat.seconds(b + 1), rank) for seat, b, rank in ranks if b < seat.cap]
        if not givers or not takers:
            return
        (last_s, giver), (first_s, taker) = max(givers), min(takers)
        if first_s >= last_s:
            return
        split[giver] -= 1
        split[taker] += 1


def step_seconds(
    models: Sequence[StepTime], batches: Sequence[int], micro_batches: Sequence[int]
) -> float:
    """Returns how long the slowest rank computes, in seconds: max_i t_i(b_i).

    Example:
        >>> device = StepTime(launch_s=0.0, sample_s=0.5)
        >>> step_seconds([device, device], [4, 6], [8, 8])
        3.0
    """
    rows = zip(models, batches, micro_batches, strict=True)
    return max(model.seconds(batch, micro) for model, batch, micro in rows)


def imbalance_floor(
    models: Sequence[StepTime],
    batches: Sequence[int],
    micro_batches: Sequence[int] | None = None,
) -> float:
    """Returns the spread of compute times below which no integer split is sure to come.

    One sample more or less on rank *i* moves its finish by c_i, so the spread cannot be pressed
    below max_i c_i/τ over the ranks with work (τ the step's compute time). A share of τ; 0 when
    no rank has work.

    Args:
        models: Step time of each rank.
        batches: Samples of each rank.
        micro_batches: Largest micro-batch of each rank. Default: each computes in one piece.

    Example:
        >>> imbalance_floor([StepTime(launch_s=0.0, sample_s=0.5)] * 2, [10, 10])
        0.1
    """
    micro_batches = [max(1, batch) for batch in batches] if micro_batches is None else micro_batches
    step_s = step_seconds(models, batches, micro_batches)
    coarse = [model.sample_s for model, batch in zip(models, batches, strict=True) if batch > 0]
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
