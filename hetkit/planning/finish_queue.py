r"""The search behind the split: which ranks finish the first *n* units of work.

Each rank finishes its units at times that rise, t_i(1) ≤ t_i(2) ≤ … . Serving the first *n* of all
ranks' finish times is optimal, and takes three moves:

1. **Bracket.** S(τ) = Σ_i max{u : t_i(u) ≤ τ} is nearly a line. From a guess by the ranks' rates,
   false position finds a τ with *n* ≤ S(τ) ≤ *n* + ranks in a handful of probes. It is the Illinois
   variant [1]_: plain false position would creep, because it keeps one end of its bracket for ever.
2. **Trim.** The few units too many are taken from whoever finishes last.
3. **Settle.** While one rank would finish a unit earlier than another finishes its last, it moves.
   That mends what rounding did in the bracket, and when it ends the split is optimal: the slowest
   rank can only give a unit to ranks that would finish it no earlier.

.. [1] M. Dowell, P. Jarratt, "A modified regula falsi method for computing the root of an
   equation", BIT 11 (1971).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_MOST_PROBES = 64


class Finish(Protocol):
    """What the split asks of a rank: when it finishes; more samples never finish earlier.

    Every `hetkit.planning.step_time.ComputeTime` answers, and so does a rank whose buckets
    overlap with its exchange (`hetkit.planning.overlap`).

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> rank: Finish = StepTime(launch_s=0.5, sample_s=0.25)
        >>> rank.seconds(6, 4), rank.samples_within(2.6, 4)
        (2.5, 6)
    """

    def seconds(self, batch: int, micro_batch: int) -> float:
        """Returns when ``batch`` samples are done, in micro-batches of at most ``micro_batch``."""

    def samples_within(self, step_s: float, micro_batch: int) -> int:
        """Returns the most samples that are done in ``step_s``; rounding can make it one off."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank in the search; it takes ``rest`` samples, and whole units of ``unit`` on top.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> seat = Seat(StepTime(launch_s=0.0, sample_s=1.0), 64, floor=1, cap=30, unit=8, rest=3)
        >>> seat.least, seat.most, seat.units_within(20.5)
        (0, 3, 2)
    """

    model: Finish
    micro_batch: int
    floor: int
    cap: int
    unit: int = 1
    rest: int = 0

    @property
    def least(self) -> int:
        """Fewest units inside the bounds."""
        return max(0, -((self.rest - self.floor) // self.unit))

    @property
    def most(self) -> int:
        """Most units inside the bounds; below `least` where no number of units is."""
        return (self.cap - self.rest) // self.unit

    def seconds(self, batch: int) -> float:
        """Returns when ``batch`` samples are done."""
        return self.model.seconds(batch, self.micro_batch)

    def units_within(self, step_s: float) -> int:
        """Returns the most units that are done in ``step_s``, whatever the bounds."""
        return (self.model.samples_within(step_s, self.micro_batch) - self.rest) // self.unit


def serve(seats: Sequence[Seat], units: int) -> tuple[int, ...]:
    """Returns the samples of each rank with which ``units`` are done first, ``rest`` included.

    Args:
        seats: The ranks; Σ `Seat.least` ≤ ``units`` ≤ Σ `Seat.most`.
        units: Whole units to serve.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> fast, slow = StepTime(launch_s=0.0, sample_s=1.0), StepTime(launch_s=0.0, sample_s=2.0)
        >>> serve([Seat(fast, 64, 0, 64), Seat(slow, 64, 0, 64)], 30)
        (20, 10)
    """
    counter = _Counter(seats)
    counter.bracket(units)
    counter.trim(sum(counter.split) - units)
    counter.settle()
    return counter.batches


class _Counter:
    """The queue of finish times, and how many units of each rank it has served."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._seats = seats
        self._bounds = [(seat.least, seat.most) for seat in seats]
        self.split: list[int] = [most for _, most in self._bounds]

    @property
    def batches(self) -> tuple[int, ...]:
        """The samples of each rank."""
        rows = zip(self._seats, self.split, strict=True)
        return tuple(seat.unit * units + seat.rest for seat, units in rows)

    def bracket(self, units: int) -> None:
        """Serves ``units`` or few more, all that are finished within one step time.

        ``short`` and ``over`` are S(τ) − units at the two ends, halved while an end stays.
        """
        leasts = [least for least, _ in self._bounds]
        if sum(leasts) == units:
            self.split = leasts
            return
        surplus = sum(self.split) - units
        short, over = float(sum(leasts) - units), float(surplus)
        low_s, high_s = 0.0, 0.0
        step_s, known, last = self._guess(units), False, 0
        for _ in range(_MOST_PROBES):
            if surplus <= len(self._seats) or not step_s > low_s:
                break
            split = self._within(step_s)
            count = sum(split) - units
            if count >= 0:
                high_s, over, known, surplus, self.split = step_s, count, True, count, split
                short = short / 2 if last > 0 else short
            else:
                low_s, short = step_s, count
                over = over / 2 if last < 0 else over
            last = 1 if count >= 0 else -1
            if known:
                step_s = low_s + (high_s - low_s) * short / (short - over)
            else:
                step_s *= 2

    def trim(self, surplus: int) -> None:
        """Takes ``surplus`` units, each from the rank that finishes last; at a tie the higher."""
        queue = [
            (-self._seconds(rank, units), -rank)
            for rank, units in enumerate(self.split)
            if units > self._bounds[rank][0]
        ]
        heapq.heapify(queue)
        for _ in range(surplus):
            rank = -queue[0][1]
            self.split[rank] -= 1
            if self.split[rank] > self._bounds[rank][0]:
                heapq.heapreplace(queue, (-self._seconds(rank, self.split[rank]), -rank))
            else:
                heapq.heappop(queue)

    def settle(self) -> None:
        """Moves units from the last to finish to who would finish them earlier, until none is."""
        givers: list[tuple[float, int, int]] = []
        takers: list[tuple[float, int, int]] = []
        for rank in range(len(self.split)):
            self._line_up(rank, givers, takers)
        while givers and takers:
            (last, giver, held), (first_s, taker, had) = givers[0], takers[0]
            if self.split[-giver] != held:
                heapq.heappop(givers)
            elif self.split[taker] != had:
                heapq.heappop(takers)
            elif first_s >= -last:
                return
            else:
                self.split[-giver] -= 1
                self.split[taker] += 1
                self._line_up(-giver, givers, takers)
                self._line_up(taker, givers, takers)

    def _line_up(
        self,
        rank: int,
        givers: list[tuple[float, int, int]],
        takers: list[tuple[float, int, int]],
    ) -> None:
        """Queues a rank with its present units; what it queued with others before is void."""
        units, (least, most) = self.split[rank], self._bounds[rank]
        if units > least:
            heapq.heappush(givers, (-self._seconds(rank, units), -rank, units))
        if units < most:
            heapq.heappush(takers, (self._seconds(rank, units + 1), rank, units))

    def _guess(self, units: int) -> float:
        """Returns the step in which ranks in full passes, without bounds, would serve ``units``."""
        rate = 0.0
        for seat, (_, most) in zip(self._seats, self._bounds, strict=True):
            size = min(seat.micro_batch, seat.unit * max(1, min(most, units)))
            rate += size / seat.seconds(size)
        return max(1, units) * self._seats[0].unit / rate

    def _within(self, step_s: float) -> list[int]:
        split = []
        for seat, (least, most) in zip(self._seats, self._bounds, strict=True):
            units = seat.units_within(step_s)
            split.append(least if units < least else most if units > most else units)
        return split

    def _seconds(self, rank: int, units: int) -> float:
        seat = self._seats[rank]
        return seat.model.seconds(seat.unit * units + seat.rest, seat.micro_batch)
