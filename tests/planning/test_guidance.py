"""Tests of until when a slow card pays, against the steps that it compares."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.planning.batch_split import split_batch, step_seconds
from hetkit.planning.guidance import guide
from hetkit.planning.step_time import StepTime


def line(sample_s, launch_s=0.0):
    return StepTime(launch_s=launch_s, sample_s=sample_s)


def step_s(models, total, exchange_s):
    split = split_batch(
        models, total, micro_batches=[total] * len(models), floors=[1] * len(models)
    )
    exchange = exchange_s if len(models) > 1 else 0.0
    return step_seconds(models, split, [total] * len(models)) + exchange


@settings(max_examples=40, deadline=None)
@given(slow=st.floats(1.2, 20.0), exchange=st.floats(0.0, 0.1))
def test_at_the_found_ratio_the_card_stops_paying(slow, exchange):
    fast, total = line(0.001), 256
    found = guide(
        ["fast", "slow"],
        [fast, line(0.001 * slow)],
        total,
        micro_batches=[total, total],
        exchange_s=lambda ranks: exchange,
    )
    worth = found.worths[0]
    alone = step_s([fast], total, exchange)
    assert worth.without_s == pytest.approx(alone)
    if worth.pays_until * 0.99 > 1e-3:
        before = step_s([fast, line(0.001 * worth.pays_until * 0.98)], total, exchange)
        assert before < alone
    if math.isfinite(worth.pays_until):
        after = step_s([fast, line(0.001 * worth.pays_until * 1.02)], total, exchange)
        assert after >= alone


def test_a_card_that_does_not_pay_is_to_be_left_out():
    found = guide(
        ["A", "B"],
        [line(0.001), line(0.05)],
        64,
        micro_batches=[64, 64],
        exchange_s=lambda ranks: 0.05,
    )
    worth = found.worths[0]
    assert worth.without_s < worth.with_s
    assert worth.least_micro_batch is None
    assert "leave it out" in worth.text


def test_small_micro_batches_stop_paying_where_a_pass_costs():
    found = guide(
        ["A", "B"],
        [line(0.001, 0.002), line(0.002, 0.02)],
        256,
        micro_batches=[256, 256],
        exchange_s=lambda ranks: 0.05,
    )
    least = found.worths[0].least_micro_batch
    assert 1 < least < 256


def test_a_further_card_brings_what_the_step_says():
    models = [line(0.001), line(0.002)]
    found = guide(["A", "B"], models, 240, micro_batches=[240, 240], exchange_s=lambda ranks: 0.0)
    further = dict(found.further)
    assert further["one more A"] == pytest.approx(step_s([*models, models[0]], 240, 0.0))
    assert further["A in place of 1 × B"] == pytest.approx(step_s([models[0]] * 2, 240, 0.0))
    assert further["one more A"] < found.step_s


def test_one_kind_alone_has_nothing_to_compare():
    found = guide(["A"], [line(0.001)], 10, micro_batches=[10], exchange_s=lambda ranks: 0.0)
    assert found.worths == ()
    assert found.step_s == pytest.approx(0.01)


def test_it_says_where_its_figures_come_from():
    found = guide(
        ["A", "B"],
        [line(0.001), line(0.002)],
        20,
        micro_batches=[20, 20],
        exchange_s=lambda ranks: 0.0,
        emulated=True,
    )
    assert "predicted" in str(found)
    assert "emulated" in str(found)
