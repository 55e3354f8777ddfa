"""The meeting: where the ranks of an own loop find out that they are not doing the same thing.

In a loop that the user wrote, one rank may take another branch. Its collectives would then meet
those of other ranks that mean something else, and hang or end the process. So every exchange begins
with seven numbers of each rank, of the same length whatever the rank is about to do::

    rank 0   step 7 │ step an optimizer │ no. 1 │ …        all alike: go on
    rank 1   step 7 │ end the loop      │ no. 0 │ …        they differ: all ranks raise, and say so
"""

import enum
from collections.abc import Sequence

from hetkit.errors import TaskError
from hetkit.worker.exchange import Exchange

FACTS = 4
"""How many more numbers each rank brings along."""


class Act(enum.IntEnum):
    """What a rank is about to do together with all others."""

    WRAP = 0
    UPDATE = 1
    EVALUATE = 2
    EPOCH = 3
    END = 4


_WORDS = {
    Act.WRAP: "wraps model {}",
    Act.UPDATE: "steps optimizer {}",
    Act.EVALUATE: "evaluates",
    Act.EPOCH: "begins the batches of epoch {}",
    Act.END: "ends its loop",
}


class Meeting:
    """Has the ranks agree that they all do the same, before they do it.

    Args:
        exchange: Carries the numbers; None for a single rank, which always agrees with itself.
        rank: This rank.

    Example:
        >>> Meeting(None, 0).meet(7, Act.UPDATE, 0, 1.0)
        [(1.0,)]
    """

    def __init__(self, exchange: Exchange | None, rank: int) -> None:
        self.rank = rank
        self._exchange = exchange

    def meet(self, step: int, act: Act, number: int = 0, *facts: float) -> list[tuple[float, ...]]:
        """Returns each rank's ``facts``, in rank order, once all are here and do the same.

        Args:
            step: The step that the rank stands at.
            act: What it is about to do.
            number: Which model or optimizer, from 0.
            *facts: At most `FACTS` more numbers; the same number of them on every rank.

        Raises:
            TaskError: Another rank is about to do something else, or in another step.
        """
        if self._exchange is None:
            return [facts]
        padding = (0.0,) * (FACTS - len(facts))
        rows = self._exchange.gather((float(step), float(act), float(number), *facts, *padding))
        if len({tuple(row[:3]) for row in rows}) > 1:
            raise TaskError(
                f"the ranks do not do the same thing: {_describe(rows)}. All ranks must make the "
                "same steps, optimizer steps and evaluations, whatever their samples are: look for "
                "a condition that differs between ranks."
            )
        return [tuple(row[3 : 3 + len(facts)]) for row in rows]

    def totals(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over the ranks, which have just met and bring as many."""
        if self._exchange is None or not values:
            return list(values)
        return [sum(column) for column in zip(*self._exchange.gather(values), strict=True)]


def _describe(rows: Sequence[Sequence[float]]) -> str:
    return ", ".join(
        f"rank {rank} {_WORDS[Act(int(act))].format(int(number))} in step {int(step)}"
        for rank, (step, act, number, *_) in enumerate(rows)
    )
