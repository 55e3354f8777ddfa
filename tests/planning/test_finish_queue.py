"""The search behind the split: bounds in units, and the queue it serves."""

import heapq
import random

import pytest

from hetkit.planning.finish_queue import Seat, serve
from hetkit.planning.step_time import StepTime

SLOW = StepTime(launch_s=0.0, sample_s=2.0)
FAST = StepTime(launch_s=0.0, sample_s=1.0)


def served_one_by_one(seats: list[Seat], units: int) -> tuple[int, ...]:
    """The queue as it is meant: the next unit goes to whoever finishes it first."""
    split = [seat.least for seat in seats]
    queue = [
        (seat.seconds(seat.unit * (split[rank] + 1)), rank)
        for rank, seat in enumerate(seats)
        if split[rank] < seat.most
    ]
    heapq.heapify(queue)
    for _ in range(units - sum(split)):
        _, rank = heapq.heappop(queue)
        split[rank] += 1
        if split[rank] < seats[rank].most:
            seat = seats[rank]
            heapq.heappush(queue, (seat.seconds(seat.unit * (split[rank] + 1)), rank))
    return tuple(seat.unit * units for seat, units in zip(seats, split, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_it_serves_what_one_by_one_would(seed: int) -> None:
    rng = random.Random(seed)
    n, unit = rng.choice([2, 7, 40]), rng.choice([1, 4])
    seats = [
        Seat(
            StepTime(
                launch_s=rng.choice([0, 1]) * rng.uniform(0, 0.1), sample_s=rng.uniform(1e-4, 0.05)
            ),
            rng.choice([1, 16, 1000]),
            floor=rng.choice([0, 1, 9]),
            cap=rng.choice([30, 200, 10**6]),
            unit=unit,
        )
        for _ in range(n)
    ]
    least, most = sum(seat.least for seat in seats), sum(seat.most for seat in seats)
    units = rng.randint(least, min(most, 50 * n))
    one_by_one = served_one_by_one(seats, units)
    split = serve(seats, units)
    assert sorted(seat.seconds(b) for seat, b in zip(seats, split, strict=True)) == sorted(
        seat.seconds(b) for seat, b in zip(seats, one_by_one, strict=True)
    )


def test_bounds_count_whole_units_beside_the_rest() -> None:
    seat = Seat(FAST, 64, floor=5, cap=20, unit=8, rest=3)
    assert (seat.least, seat.most) == (1, 2)
    nothing = Seat(FAST, 64, floor=9, cap=15, unit=8)
    assert nothing.least > nothing.most


def test_ranks_a_thousand_times_apart_are_found_too() -> None:
    slow = StepTime(launch_s=1000.0, sample_s=1000.0)
    seats = [Seat(FAST, 10**9, 0, 10**9), Seat(slow, 10**9, 1, 10**9)]
    assert serve(seats, 10**6) == (999_002, 998)


def test_no_units_leave_the_rest_only() -> None:
    assert serve([Seat(FAST, 8, 0, 8, unit=4, rest=3), Seat(SLOW, 8, 0, 8, unit=4)], 0) == (3, 0)


def test_all_that_fits_is_served() -> None:
    assert serve([Seat(FAST, 8, 0, 5), Seat(SLOW, 8, 0, 7)], 12) == (5, 7)
