import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hetkit.settings import Settings
from hetkit.widgets.frames import (
    PARTS,
    WINDOW_S,
    decimate,
    fleet,
    head,
    new_points,
    pack,
    pending,
    window,
)

VALUES = npst.arrays(
    float, st.integers(0, 300), elements=st.floats(-1e6, 1e6, width=32) | st.just(float("nan"))
)


@given(VALUES, st.integers(4, 50))
def test_decimation_is_bounded_ordered_and_keeps_ends_and_extremes(
    values: np.ndarray, limit: int
) -> None:
    steps = np.arange(len(values), dtype=float)
    x, y = decimate(steps, values, limit)
    assert len(x) == len(y) <= max(limit, 0)
    assert (np.diff(x) > 0).all()
    assert np.array_equal(values[x.astype(int)], y, equal_nan=True)
    if len(values):
        assert (x[0], x[-1]) == (steps[0], steps[-1])
    if np.isfinite(values).any():
        assert np.nanmin(y) == np.nanmin(values)
        assert np.nanmax(y) == np.nanmax(values)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.integers(0, 2**40))
def test_packed_columns_come_back_with_exact_steps(
    series: dict[str, np.ndarray], first: int
) -> None:
    points = {k: (first + np.arange(len(v), dtype=float), v) for k, v in series.items()}
    base, layout, data = pack(points)
    columns = np.frombuffer(data, "<f4").astype(float)
    for key, count in layout:
        x, y, columns = columns[:count] + base, columns[count : 2 * count], columns[2 * count :]
        assert np.array_equal(x, points[key][0])
        assert np.array_equal(y, points[key][1], equal_nan=True)
    assert not len(columns)
    assert {key for key, _ in layout} == {key for key, v in series.items() if len(v)}


def test_before_the_first_step_every_figure_is_missing_not_zero(session: Any) -> None:
    shown = head(session, [])
    assert shown["samples_per_s"] is None
    assert shown["loss"] is None
    for device in shown["devices"]:
        assert all(value is None for value in device.values())


def test_the_head_is_plain_json_and_the_parts_add_up_to_the_step(session: Any) -> None:
    session.advance(20)
    shown = head(session, window(session.history.records_since(-1), session.plan))
    json.dumps(shown, allow_nan=False)
    for device in shown["devices"]:
        assert len(device["parts"]) == len(PARTS)
        assert sum(device["parts"]) == pytest.approx(device["step_s"], rel=1e-4)
    assert shown["devices"][2]["memory_bytes"] is None
    total = sum(device["samples_per_s"] for device in shown["devices"])
    assert total == pytest.approx(shown["samples_per_s"], rel=1e-4)
    assert sum(device["batch"] for device in shown["devices"]) == 256


def test_now_goes_back_a_few_seconds_and_never_over_a_new_plan(session: Any) -> None:
    session.advance(30)
    records = session.history.records_since(-1)
    now = window(records, session.plan)
    assert now[-1] is records[-1]
    assert now[0].time_s > records[-1].time_s - WINDOW_S
    session.set(batches="auto")
    session.advance(2)
    now = window(session.history.records_since(-1), session.plan)
    assert [record.step for record in now] == [30, 31]
    assert window([], session.plan) == []


def test_a_step_slower_than_the_window_is_still_shown(session: Any) -> None:
    session.advance(1)
    records = session.history.records_since(-1)
    assert window(records, None) == records


def test_only_points_after_the_given_step_are_new(session: Any) -> None:
    session.advance(10)
    points = new_points(session.history, after=7)
    assert set(points) == {"loss", "comm", "speed", "speed:0", "speed:1", "speed:2"}
    assert all(x.tolist() == [8, 9] for x, _ in points.values())


def test_the_fleet_says_what_is_emulated(session: Any) -> None:
    assert [device["emulated"] for device in fleet(session)] == [True, True, True]


def test_pending_names_what_is_asked_and_not_in_force() -> None:
    applied = Settings(global_batch=64)
    requested = applied.change(amp="bf16", batches=[48, 16])
    assert pending(requested, applied) == [
        {"name": "batches", "requested": "48 : 16", "applied": "auto", "effect": "next grant"},
        {"name": "amp", "requested": "bf16", "applied": "off", "effect": "next epoch"},
    ]
    assert pending(requested, None) == []


def test_the_guard_s_newest_reading_is_shown_under_compression_only(session: Any) -> None:
    session.advance(12)
    assert head(session, [])["guard"] is None
    session.set(compression="int8")
    session.advance(40)
    assert head(session, [])["guard"] == {"cosine": 0.95, "error": 0.3}


def test_the_epoch_s_newest_notice_is_shown_and_none_of_an_earlier_epoch(session: Any) -> None:
    session.advance(3)
    assert head(session, [])["notice"] is None
    for text in ("the first", "the second"):
        session._mark("notice", text)
    assert head(session, [])["notice"] == "the second"
    session.advance(40)
    assert head(session, [])["notice"] is None
