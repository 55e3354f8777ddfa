from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.widgets.batches import BatchControls, apportion, share_rest

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)
BATCHES = st.lists(st.integers(0, 5000), min_size=1, max_size=8).filter(any)


@given(WEIGHTS, st.integers(0, 10_000))
def test_apportioned_parts_sum_and_stay_within_one_of_their_share(
    weights: list[float], total: int
) -> None:
    parts = apportion(weights, total)
    assert sum(parts) == total
    assert min(parts) >= 0
    whole = sum(weights)
    for part, weight in zip(parts, weights, strict=True):
        share = total * weight / whole if whole else total / len(weights)
        assert abs(part - share) < 1 + 1e-6


@given(BATCHES, st.data())
def test_moving_one_keeps_the_sum_and_the_others_proportion(
    batches: list[int], data: st.DataObject
) -> None:
    total = sum(batches)
    rank = data.draw(st.integers(0, len(batches) - 1))
    batch = data.draw(st.integers(-10, total + 10))
    moved = share_rest(batches, rank, batch)
    assert sum(moved) == total
    assert min(moved) >= 0
    if len(batches) > 1:
        assert moved[rank] == min(max(batch, 0), total)
    others = total - batches[rank]
    for other, (before, after) in enumerate(zip(batches, moved, strict=True)):
        if other != rank and others:
            assert abs(after - before * (total - moved[rank]) / others) < 1 + 1e-6


@given(BATCHES, st.data())
def test_moving_one_to_where_it_is_changes_nothing(batches: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(batches) - 1))
    assert share_rest(batches, rank, batches[rank]) == tuple(batches)


@pytest.fixture
def controls(session: Any, said: list[str]) -> BatchControls:
    return BatchControls(session, said.append)


def shown(controls: BatchControls) -> list[int]:
    assert [s.value for s in controls.sliders] == [b.value for b in controls.boxes]
    return [slider.value for slider in controls.sliders]


def test_the_sliders_show_only_on_manual(session: Any, controls: BatchControls) -> None:
    assert controls.mode.value == "even"
    assert controls.manual.layout.display == "none"
    controls.mode.value = "manual"
    assert controls.manual.layout.display == "flex"
    assert session.calls == [("set", {"batches": [86, 85, 85]})]
    assert shown(controls) == [86, 85, 85]


def test_manual_starts_from_the_plan_in_force(session: Any, controls: BatchControls) -> None:
    controls.mode.value = "auto"
    session.advance()
    controls.mode.value = "manual"
    assert session.settings.batches == session.plan.batches


def test_moving_a_slider_moves_the_others_and_asks_once(
    session: Any, controls: BatchControls
) -> None:
    controls.mode.value = "manual"
    session.calls.clear()
    controls.sliders[0].value = 156
    assert shown(controls) == [156, 50, 50]
    assert session.calls == [("set", {"batches": [156, 50, 50]})]
    controls.boxes[2].value = 0
    assert shown(controls) == [194, 62, 0]
    assert controls.shares[0].value == "76%"


def test_what_a_cell_sets_is_shown_and_asks_nothing(session: Any, controls: BatchControls) -> None:
    session.set(batches=[200, 40, 16])
    session.calls.clear()
    controls.refresh()
    assert controls.mode.value == "manual"
    assert shown(controls) == [200, 40, 16]
    session.settings = session.settings.change(global_batch=64, batches=[2.0, 1.0, 1.0])
    controls.refresh()
    assert shown(controls) == [32, 16, 16]
    assert [slider.max for slider in controls.sliders] == [64, 64, 64]
    assert session.calls == []


def test_a_refused_split_goes_back_and_says_why(
    session: Any, controls: BatchControls, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controls.mode.value = "manual"

    def refuse(**_: object) -> None:
        raise ValueError("not now")

    monkeypatch.setattr(session, "set", refuse)
    controls.sliders[0].value = 156
    assert shown(controls) == [86, 85, 85]
    assert said[-1] == "ValueError: not now"


def test_every_slider_and_box_has_a_text(controls: BatchControls) -> None:
    assert [slider.description for slider in controls.sliders] == ["A100 #0", "V100 #1", "3090 #2"]
    assert all(box.description and box.tooltip for box in controls.boxes)
