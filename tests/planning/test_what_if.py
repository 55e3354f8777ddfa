"""Tests of predictions: what cancels, what each change adds, and what the interval is made of."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.devices.fleet import emulate
from hetkit.plan import Plan
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.exposure import LinkFit
from hetkit.planning.situation import AS_IT_IS, CodecCost, Parts, RankPace, Situation
from hetkit.planning.step_time import StepTime
from hetkit.planning.what_if import Prediction, predict

FLEET = emulate("1xA100 + 1xV100", pace={"A100": 2.0}).devices
LINK = LinkFit(hop_s=0.001, byte_s=1e-6, error=0.02, certain=True)
HALF = CodecCost(element_s=1e-7, element_error=0.1, ring_share=0.5, half_rounds=2)
FAST, SLOW = StepTime(launch_s=0.01, sample_s=0.005), StepTime(launch_s=0.01, sample_s=0.01)


def plan(**given_) -> Plan:
    values = {
        "version": 1,
        "epoch": 0,
        "first_step": 0,
        "epoch_first_step": 0,
        "epoch_steps": 10,
        "global_batch": 40,
        "batches": (20, 20),
        "micro_batches": (40, 40),
        "amp": ("off", "off"),
        "compression": "none",
    }
    return Plan(**{**values, **given_})


def paces(*models, error=0.0, jitter=0.0, sizes=(20.0, 10.0)) -> tuple[RankPace, ...]:
    return tuple(RankPace(model=m, error=error, jitter=jitter, sizes=sizes) for m in models)


def situation(**given_) -> Situation:
    raw = 1e5
    transfer_s = LINK.seconds(2, ring_bytes(2, raw))
    values = {
        "plan": plan(),
        "devices": FLEET,
        "ranks": paces(FAST, SLOW),
        "parts": Parts(
            data_s=0.001,
            compute_s=0.21,
            wait_s=0.0,
            transfer_s=transfer_s,
            codec_s=0.0,
            optimizer_s=0.002,
            other_s=0.003,
        ),
        "step_error_s": 0.0,
        "link": LINK,
        "bucket_bytes": (raw,),
    }
    return Situation(**{**values, **given_})


@given(
    optimizer_s=st.floats(0, 1),
    other_s=st.floats(-0.01, 1),
    batches=st.integers(1, 39).map(lambda b: (b, 40 - b)),
)
def test_no_change_predicts_what_was_measured_whatever_the_model_misses(
    optimizer_s, other_s, batches
):
    now = situation(plan=plan(batches=batches))
    parts = replace(now.parts, compute_s=0.5, optimizer_s=optimizer_s, other_s=other_s)
    now = replace(now, parts=parts)
    assert predict(now, now.plan).parts == parts


def test_a_split_moves_the_compute_of_the_slowest_rank():
    new = predict(situation(), plan(batches=(26, 14)))
    assert new.parts.compute_s == pytest.approx(0.15)
    assert new.parts.transfer_s == pytest.approx(situation().parts.transfer_s)
    assert new.samples_per_s == pytest.approx(40 / new.step_s)


def test_a_codec_sends_less_and_takes_time_of_its_own():
    new = predict(situation(), plan(compression="fp16"), costs={"fp16": HALF})
    assert new.parts.transfer_s == pytest.approx(LINK.seconds(2, 5e4))
    assert new.parts.codec_s == pytest.approx(25_000 * 1e-7)
    assert not new.notes


def test_a_codec_of_unknown_cost_is_said_to_be_unknown():
    new = predict(situation(), plan(compression="fp16"))
    assert new.parts == situation().parts
    assert any("fp16" in note and "not known" in note for note in new.notes)


def test_more_passes_cost_their_launches():
    new = predict(situation(), plan(micro_batches=(10, 10)))
    assert new.parts.compute_s == pytest.approx(0.22)


def test_buckets_overlap_with_the_backward_before_the_last():
    two = predict(situation(), plan(bucket_bytes=50_000), tensor_bytes=(5e4, 5e4))
    # Half of the bytes is ready after 2/3 of 0.21 s, and through before the rest is.
    assert two.parts.transfer_s == pytest.approx(LINK.seconds(2, 5e4))
    unknown = predict(situation(), plan(bucket_bytes=50_000))
    assert any("buckets" in note for note in unknown.notes)


def test_local_steps_share_one_exchange():
    new = predict(situation(), plan(sync_every=4))
    assert new.parts.transfer_s == pytest.approx(situation().parts.transfer_s / 4)
    assert any("other maths" in note for note in new.notes)


def test_an_untried_precision_has_the_catalogues_gain_and_wide_ends():
    fleet = emulate("1xA100 + 1xV100", pace={"A100": 2.0}, matmul_share=0.6).devices
    now = situation(devices=fleet)
    new = predict(now, plan(amp=("fp16", "fp16")))
    gain = fleet[1].emulation.amp_pace["fp16"]
    assert new.parts.compute_s == pytest.approx(0.01 + 0.2 / gain)
    assert new.low_s < new.step_s - 0.02
    assert new.high_s > new.step_s + 0.02
    assert any("precision" in note for note in new.notes)


def test_one_size_leaves_open_what_is_fixed():
    now = situation(ranks=paces(FAST, StepTime(launch_s=0.0, sample_s=0.0105), sizes=(20.0,)))
    new = predict(now, plan(batches=(30, 10)))
    assert new.high_s == pytest.approx(situation().parts.step_s, abs=0.001)  # all fixed cost
    assert new.low_s < new.step_s < new.high_s
    assert any("one batch size" in note for note in new.notes)


def test_one_size_of_transfer_leaves_open_what_is_latency():
    now = situation(link=replace(LINK, hop_s=0.0, certain=False))
    new = predict(now, plan(compression="fp16"), costs={"fp16": HALF})
    assert new.high_s - new.step_s > 0.04
    assert any("latency" in note for note in new.notes)


def test_the_interval_adds_independent_errors_as_squares():
    now = situation(step_error_s=0.003, trust=0.04)
    new = predict(now, now.plan)
    sigma = (2 * 0.003**2 + (0.04 * new.step_s) ** 2) ** 0.5
    assert new.high_s - new.step_s == pytest.approx(1.96 * sigma)
    assert new.step_s - new.low_s == pytest.approx(1.96 * sigma)


def test_jitter_makes_balanced_ranks_wait_for_each_other():
    now = situation(ranks=paces(FAST, SLOW, jitter=0.05))
    balanced = predict(now, plan(batches=(26, 14)))
    # E[max] of two normal values (Clark 1961), less the larger mean.
    sigma, gap = 0.05 * math.hypot(0.14, 0.15), 0.01
    normal = NormalDist(0.0, 1.0)
    late = sigma * normal.pdf(gap / sigma) - gap * normal.cdf(-gap / sigma)
    assert balanced.parts.wait_s == pytest.approx(late, rel=0.02)


def test_islands_are_predicted_from_the_links_that_are_stated():
    fleet = emulate("2xA100 + 2xV100", link={"intra": "1GB/s", "inter": "1MB/s"}).devices
    four = plan(batches=(10,) * 4, micro_batches=(40,) * 4, amp=("off",) * 4)
    now = situation(plan=four, devices=fleet, ranks=paces(FAST, FAST, SLOW, SLOW), link=None)
    over = predict(now, replace(four, hierarchy=((0, 1), (2, 3))))
    assert over.parts.transfer_s < now.parts.transfer_s


def test_without_any_link_the_exchange_stays_what_it_is():
    fleet = tuple(replace(device, emulation=None) for device in FLEET)
    now = situation(devices=fleet, link=None)
    new = predict(now, plan(compression="fp16"), costs={"fp16": HALF})
    assert new.parts.transfer_s == now.parts.transfer_s
    assert any("links are not known" in note for note in new.notes)


@given(share=st.floats(0.01, 1), byte_s=st.floats(1e-9, 1e-5))
def test_fewer_bytes_never_take_longer(share, byte_s):
    now = situation(link=replace(LINK, byte_s=byte_s))
    cost = replace(AS_IT_IS, ring_share=share)
    new = predict(now, plan(compression="fp16"), costs={"fp16": cost})
    assert isinstance(new, Prediction)
    assert new.step_s <= now.parts.step_s + 1e-9
    assert new.low_s <= new.step_s <= new.high_s


def test_tf32_is_not_emulated():
    new = predict(situation(), plan(tf32=True))
    assert new.parts == situation().parts
    assert hk.Settings().tf32 is False
