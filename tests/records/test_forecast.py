"""Tests of the forecast: what it takes from steps, and what it said beside what came."""

from dataclasses import replace

import pytest

from hetkit.devices.fleet import emulate
from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.pace import Pace
from hetkit.planning.situation import CodecCost
from hetkit.planning.step_time import Observation
from hetkit.planning.time_split import Stamps
from hetkit.records.assembly import StepAssembly
from hetkit.records.forecast import Forecast
from hetkit.records.trial import Trial

FLEET = emulate("1xA100 + 1xV100", pace={"A100": 2.0}).devices
RAW = 4000
PLAN = Plan(
    version=1,
    epoch=0,
    first_step=0,
    epoch_first_step=0,
    epoch_steps=100,
    global_batch=20,
    batches=(10, 10),
    micro_batches=(20, 20),
    amp=("off", "off"),
    compression="none",
)


def row(step: int, compute_s: float, *, until: float, buckets=(RAW,), **given) -> StepRow:
    """One rank's row: it computes, hands its buckets over at the end, and all end together."""
    start = 10.0 * step
    cut = start + compute_s
    stamps = Stamps(
        start=start,
        end=start + until + 0.01,
        cut=cut,
        data_s=0.0,
        optimizer_s=0.01,
        collectives=given.pop("collectives", ((cut, start + until),)),
    )
    values = {"epoch": 0, "batch": 10, "micro_steps": 1, "loss_sum": 10.0, "count": 10.0}
    values |= {"wire_bytes": float(RAW), "bucket_bytes": buckets}
    return StepRow(step=step, stamps=stamps, **{**values, **given})


def feed(forecast: Forecast, steps: range, *, transfer_s: float = 0.1, **given) -> None:
    assembly = StepAssembly((0, 1), 0.0)
    for step in steps:
        until = 0.2 + transfer_s
        assembly.add(0, [row(step, 0.1, until=until, **given)])
        ((record, rows),) = assembly.add(1, [row(step, 0.2, until=until, **given)])
        forecast.add(record, rows)


def paces() -> list[Pace]:
    return [
        Pace().take(
            [
                Observation(batch=b, micro_steps=1, compute_s=c * b)
                for b in (10, 20)
                for _ in "12345"
            ]
        )
        for c in (0.01, 0.02)
    ]


def fed(steps: int = 10) -> Forecast:
    forecast = Forecast()
    forecast.begin(PLAN, None)
    feed(forecast, range(steps))
    return forecast


def test_the_first_two_steps_of_a_plan_say_nothing():
    assert fed(2).steps == 0
    assert fed(4).situation(FLEET, paces()) is None
    assert fed(5).situation(FLEET, paces()) is not None


def test_the_situation_is_the_slowest_ranks_and_adds_up():
    now = fed().situation(FLEET, paces())
    assert now.parts.compute_s == pytest.approx(0.2)
    assert now.parts.transfer_s == pytest.approx(0.1)
    assert now.parts.step_s == pytest.approx(0.31)
    assert now.link.seconds(2, ring_bytes(2, RAW)) == pytest.approx(0.1)
    assert not now.link.certain
    assert now.emulated


def test_nothing_is_said_of_ranks_that_are_not_known():
    assert fed().situation(FLEET, [Pace(), Pace()]) is None
    assert fed().situation(FLEET, paces()[:1]) is None


def test_a_prediction_stands_beside_what_came():
    forecast = fed()
    now = forecast.situation(FLEET, paces())
    after = replace(PLAN, version=2, first_step=10, batches=(13, 7))
    forecast.begin(after, now)
    assert forecast.predicted.parts.compute_s == pytest.approx(0.14)
    feed(forecast, range(10, 20))
    kept = forecast.close_epoch()
    assert kept.measured_s == pytest.approx(0.31)
    assert kept.error == pytest.approx(0.25 / 0.31 - 1, abs=0.01)
    trusted = forecast.situation(FLEET, paces())
    assert trusted.trust == pytest.approx(abs(kept.error))


def test_without_a_base_or_the_codecs_cost_there_is_no_prediction():
    forecast = Forecast()
    forecast.begin(PLAN, None)
    assert forecast.predicted is None
    forecast = fed()
    now = forecast.situation(FLEET, paces())
    forecast.begin(replace(PLAN, compression="fp16"), now)
    assert forecast.predicted is None
    cost = CodecCost(element_s=1e-9, element_error=0.0, ring_share=0.5, half_rounds=2)
    trial = Trial(
        costs={"fp16": cost},
        transfers=(),
        wire_s={"fp16": 0.08},
        bucket_bytes=(4000.0,),
        shapes=((10, 100),),
        element_bytes=4,
        fixed_bytes=0.0,
    )
    forecast.learn(trial)
    forecast.begin(replace(PLAN, compression="fp16"), now)
    assert forecast.predicted is not None
    # Half of the bytes takes half of 0.1 s on this link; 0.08 s were measured.
    assert forecast.costs["fp16"].bucket_s == pytest.approx(0.03)
    assert forecast.tensor_bytes == (4000.0,)


def test_two_sizes_of_transfer_tell_latency_from_rate():
    forecast = fed()
    forecast.begin(replace(PLAN, first_step=10, bucket_bytes=2000), None)
    feed(forecast, range(10, 20), transfer_s=0.06, buckets=(RAW // 2,))
    link = forecast.link()
    assert link.certain
    assert 2 * link.hop_s == pytest.approx(0.02, rel=1e-3)


def test_a_bucket_that_did_not_wait_tells_when_it_was_ready():
    forecast = Forecast()
    forecast.begin(PLAN, None)
    assembly = StepAssembly((0, 1), 0.0)
    for step in range(9):
        start = 10.0 * step
        spans = ((start + 0.15, start + 0.17), (start + 0.2, start + 0.25))
        given = {"until": 0.25, "buckets": (1000, 3000), "collectives": spans}
        assembly.add(0, [row(step, 0.2, **given)])
        ((record, rows),) = assembly.add(1, [row(step, 0.2, **given)])
        forecast.add(record, rows)
    now = forecast.situation(FLEET, paces())
    ((at, share),) = now.seen_shares
    assert at == pytest.approx(0.25)
    assert share == pytest.approx(0.75)


def test_steps_with_other_collectives_teach_no_link():
    forecast = Forecast()
    forecast.begin(PLAN, None)
    feed(forecast, range(9), guard_cosine=0.9)
    assert forecast.link() is None
    forecast.begin(replace(PLAN, hierarchy=((0,), (1,))), None)
    feed(forecast, range(9))
    assert forecast.link() is None


def test_smaller_steps_and_other_devices_do_not_count():
    forecast = Forecast()
    forecast.begin(PLAN, None)
    feed(forecast, range(9), batch=3)
    assert forecast.steps == 0
    forecast = fed()
    forecast.reset()
    assert forecast.situation(FLEET, paces()) is None
    assert forecast.link() is None
    assert forecast.close_epoch().measured_s is None
