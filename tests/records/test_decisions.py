import pytest

from hetkit.planning.balancer import Decision
from hetkit.records.decisions import MOST_DECISIONS, Decisions, Effect


def stay(reason: str = "balanced", gain: float = 0.001) -> Decision:
    return Decision(reason=reason, outcome="balanced", predicted_gain=gain)


def replan(*batches: int) -> Decision:
    return Decision(reason="hot", outcome="replan", batches=batches, predicted_gain=0.14)


def test_windows_that_stay_alike_are_one_row_with_the_latest_figures():
    decisions = Decisions()
    for step, gain in ((6, 0.001), (11, 0.002), (16, 0.003)):
        decisions.add(stay(gain=gain), step=step, batches=(45, 19))
    (row,) = decisions
    assert (row.step, row.windows, row.predicted_gain) == (6, 3, 0.003)


def test_another_outcome_or_another_split_begins_a_row():
    decisions = Decisions()
    decisions.add(stay(), step=6, batches=(45, 19))
    decisions.add(Decision(reason="few"), step=11, batches=(45, 19))
    decisions.add(replan(38, 26), step=16, batches=(45, 19))
    decisions.add(replan(37, 27), step=21, batches=(38, 26))
    decisions.add(stay(), step=26, batches=(37, 27))
    assert [row.outcome for row in decisions] == [
        "balanced", "measuring", "replan", "replan", "balanced"
    ]  # fmt: skip
    assert [row.new_batches for row in decisions.replans] == [(38, 26), (37, 27)]


def test_the_gain_stands_beside_the_last_replan():
    decisions = Decisions()
    decisions.add(replan(38, 26), step=6, batches=(32, 32))
    decisions.add(stay(), step=13, batches=(38, 26))
    decisions.measure(0.125)
    assert [row.measured_gain for row in decisions] == [0.125, None]
    text = str(decisions)
    assert "→ 38 + 26" in text
    assert "14 %" in text
    assert "–" in text.splitlines()[-1]


def test_the_table_escapes_and_is_bounded():
    decisions = Decisions()
    assert "nothing yet" in str(decisions)
    for step in range(MOST_DECISIONS + 3):
        decisions.add(replan(step, 1), step=step, batches=(1, step))
    assert len(decisions) == MOST_DECISIONS
    assert decisions[0].step == 3
    assert len(decisions[:2]) == 2
    decisions.add(stay("<b>"), step=9, batches=(1,))
    assert "<b>" not in decisions[-1:]._repr_html_()


def window(effect: Effect, *steps_s: float) -> float | None:
    for step_s in steps_s:
        effect.add(step_s)
    return effect.window()


def test_the_effect_is_the_ratio_of_the_medians_around_a_replan():
    effect = Effect()
    assert window(effect, 1.0, 5.0, 1.0) is None
    effect.expect((3, 1))
    assert window(effect, 1.0) is None, "the plan has not begun"
    effect.begins((3, 1), alike=True)
    assert window(effect, 0.8, 0.8, 9.0) == pytest.approx(0.2)
    assert window(effect, 0.8) is None, "told once"


@pytest.mark.parametrize(("batches", "alike"), [((3, 1), False), ((2, 2), True)])
def test_no_effect_is_told_where_something_else_changed(batches, alike):
    effect = Effect()
    window(effect, 1.0, 1.0)
    effect.expect((3, 1))
    effect.begins(batches, alike=alike)
    assert window(effect, 0.5, 0.5) is None


def test_a_plan_of_the_same_split_goes_on_measuring():
    effect = Effect()
    window(effect, 1.0)
    effect.expect((3, 1))
    effect.begins((3, 1), alike=True)
    effect.begins((3, 1), alike=True)
    assert window(effect, 0.5) == 0.5


def test_a_window_without_a_full_step_tells_nothing():
    effect = Effect()
    window(effect, 1.0)
    effect.expect((3, 1))
    effect.begins((3, 1), alike=True)
    assert effect.window() is None
    assert window(effect, 0.5) == 0.5
