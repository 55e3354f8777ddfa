r"""Who takes the samples that are left over when batches are whole units.

B = Q·q + r: one rank takes r samples beside its units of q. Let T(n) be the shortest step of n
whole units, u_i what rank *i* takes of Q of them, and j the rank that takes the rest. Between T(Q)
and T(Q + 1) no rank finishes another unit, so within that time j must finish the rest on top of its
own u_j, or the step lasts until T(Q + 1), where j gives up one unit for it:

    T ≥ max{ T(Q), min[ T(Q + 1), min_j t_j(q·u_j + r) ] }

The rank with the least t_j(q·u_j + r), or one that has a unit to give up, meets that bound, unless
a floor or a cap stands in the way. So these two are tried first and the others only while the bound
is not met, and none of them where the other ranks' floors alone last longer than the best so far.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from hetkit.planning.finish_queue import Seat, serve


def serve_with_rest(seats: Sequence[Seat], units: int, rest: int) -> tuple[int, ...] | None:
    """Returns the batches with the shortest step in which one rank takes ``rest`` beside its units.

    Args:
        seats: The ranks, without any rest.
        units: Whole units to serve.
        rest: Samples left over: above 0 and less than a unit.

    Returns:
        None where the bounds allow it to no rank.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> fast, slow = StepTime(launch_s=0.0, sample_s=1.0), StepTime(launch_s=0.0, sample_s=3.0)
        >>> serve_with_rest([Seat(slow, 64, 0, 64, unit=16), Seat(fast, 64, 0, 64, unit=16)], 4, 3)
        (16, 51)
    """
    # With every floor eased by the rest, whatever any rank can do is allowed: a lower bound.
    eased = [replace(seat, floor=max(0, seat.floor - rest)) for seat in seats]
    if not _serves(eased, units):
        return None
    alone = serve(eased, units)
    more = serve(eased, units + 1) if _serves(eased, units + 1) else None
    with_rest_s = [
        seat.seconds(batch + rest) if batch + rest <= seat.cap else math.inf
        for seat, batch in zip(seats, alone, strict=True)
    ]
    more_s = _step_s(seats, more) if more else math.inf
    bound_s = max(_step_s(seats, alone), min(more_s, *with_rest_s))
    order = sorted(range(len(seats)), key=lambda rank: (with_rest_s[rank], rank))
    if more:
        order.insert(1, max(range(len(seats)), key=lambda rank: (more[rank] > 0, more[rank])))
    return _first_to_meet(bound_s, seats, units, rest, order)


def _first_to_meet(
    bound_s: float, seats: Sequence[Seat], units: int, rest: int, order: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the best split of those in which a rank of ``order`` takes the rest."""
    floors_s = [seat.seconds(seat.unit * seat.least) for seat in seats]
    slowest = max(range(len(seats)), key=lambda rank: floors_s[rank])
    others_s = max((s for rank, s in enumerate(floors_s) if rank != slowest), default=0.0)
    best: tuple[int, ...] | None = None
    best_s = math.inf
    for rank in order:
        if (others_s if rank == slowest else floors_s[slowest]) >= best_s:
            continue
        tried = [*seats[:rank], replace(seats[rank], rest=rest), *seats[rank + 1 :]]
        if not _serves(tried, units):
            continue
        split = serve(tried, units)
        step_s = _step_s(seats, split)
        if step_s < best_s:
            best, best_s = split, step_s
        if best_s <= bound_s:
            break
    return best


def _serves(seats: Sequence[Seat], units: int) -> bool:
    """Whether the bounds allow ``units``."""
    least, most = sum(seat.least for seat in seats), sum(seat.most for seat in seats)
    return least <= units <= most and all(seat.least <= seat.most for seat in seats)


def _step_s(seats: Sequence[Seat], split: Sequence[int]) -> float:
    return max(seat.seconds(batch) for seat, batch in zip(seats, split, strict=True))
