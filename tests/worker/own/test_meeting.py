import pytest

from hetkit.errors import TaskError
from hetkit.worker.own.meeting import FACTS, Act, Meeting


class Others:
    """An exchange where the other ranks bring what they were told to."""

    def __init__(self, *rows: tuple[float, ...]) -> None:
        self.rows = rows

    def gather(self, values: tuple[float, ...]) -> list[list[float]]:
        assert all(len(row) == len(values) for row in self.rows)
        return [list(values), *map(list, self.rows)]


def row(step: int, act: Act, number: int, *facts: float) -> tuple[float, ...]:
    return (step, act, number, *facts, *(0.0,) * (FACTS - len(facts)))


def test_ranks_that_do_the_same_get_each_others_facts():
    meeting = Meeting(Others(row(7, Act.UPDATE, 1, 5.0, 6.0)), 0)  # type: ignore[arg-type]
    assert meeting.meet(7, Act.UPDATE, 1, 3.0, 4.0) == [(3.0, 4.0), (5.0, 6.0)]


@pytest.mark.parametrize("act", Act)
def test_every_act_has_words(act):
    meeting = Meeting(Others(row(8, act, 2)), 0)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"rank 0 .* in step 7, rank 1 .* in step 8\. All ranks"):
        meeting.meet(7, Act.UPDATE, 1)


def test_totals_are_sums_over_the_ranks():
    assert Meeting(Others((1.0, 2.0)), 0).totals([10.0, 20.0]) == [11.0, 22.0]  # type: ignore[arg-type]
    assert Meeting(None, 0).totals([10.0]) == [10.0]
