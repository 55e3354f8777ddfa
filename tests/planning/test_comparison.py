"""Tests of what-if tables: gain, recommendation, and the rate at which a codec breaks even."""

import math
from dataclasses import replace

import pytest

from hetkit.devices.fleet import emulate
from hetkit.plan import Plan
from hetkit.planning.comparison import WhatIf, break_even, compare
from hetkit.planning.exposure import LinkFit
from hetkit.planning.situation import CodecCost, Parts, RankPace, Situation
from hetkit.planning.step_time import StepTime
from hetkit.planning.what_if import predict

RAW = 1e6
LINK = LinkFit(hop_s=0.0, byte_s=1e-8, error=0.0, certain=True)
HALF = CodecCost(element_s=4e-8, element_error=0.0, ring_share=0.5, half_rounds=2)
PLAN = Plan(
    version=1,
    epoch=0,
    first_step=0,
    epoch_first_step=0,
    epoch_steps=10,
    global_batch=20,
    batches=(10, 10),
    micro_batches=(10, 10),
    amp=("off", "off"),
    compression="none",
)
CODED = replace(PLAN, compression="fp16")


def situation(link: LinkFit = LINK) -> Situation:
    pace = RankPace(
        model=StepTime(launch_s=0.0, sample_s=0.001), error=0.0, jitter=0.0, sizes=(5.0, 10.0)
    )
    return Situation(
        plan=PLAN,
        devices=emulate("2xV100").devices,
        ranks=(pace, pace),
        parts=Parts(
            data_s=0.0,
            compute_s=0.01,
            wait_s=0.0,
            transfer_s=link.seconds(2, RAW),
            codec_s=0.0,
            optimizer_s=0.0,
            other_s=0.0,
        ),
        step_error_s=0.0,
        link=link,
        bucket_bytes=(RAW,),
    )


def what_if(link: LinkFit = LINK, cost: CodecCost = HALF) -> WhatIf:
    now = situation(link)
    new = predict(now, CODED, costs={"fp16": cost})
    return compare(now, new, changes=["compression: none → fp16"], costs={"fp16": cost})


def test_nothing_overlapped_breaks_even_by_the_formula():
    # B* = (bytes without − bytes with)/(codec seconds): 0.5 MB / (250,000 · 40 ns) = 50 MB/s
    assert what_if().break_even_bytes_per_s == pytest.approx(5e7, rel=1e-6)


def test_a_codec_that_costs_nothing_always_pays_and_one_that_saves_nothing_never():
    free = replace(HALF, element_s=0.0)
    assert math.isinf(what_if(cost=free).break_even_bytes_per_s)
    idle = replace(HALF, ring_share=1.0)
    assert what_if(cost=idle).break_even_bytes_per_s == 0
    assert "never" in str(what_if(cost=idle))
    assert "always" in str(what_if(cost=free))


def test_recommended_above_five_per_cent_and_only_surely():
    slow = replace(LINK, byte_s=1e-7)
    assert what_if(slow).recommended
    assert what_if(slow).gain > 0.3
    little = replace(LINK, byte_s=2.2e-8)
    assert 0 < what_if(little).gain < 0.05
    assert what_if(little).recommended is False
    unsure = replace(slow, certain=False)
    assert what_if(unsure).recommended is False
    assert "not recommended" in str(what_if(unsure))


def test_the_table_says_what_each_figure_is():
    text = str(what_if())
    assert "now (measured)" in text
    assert "predicted from measured steps, emulated" in text
    assert "19 in 20" in text
    html = what_if()._repr_html_()
    assert html.count("<tr>") == 10
    assert "emulated" in html


def test_without_a_codec_nothing_is_recommended():
    now = situation()
    same = compare(now, predict(now, PLAN), changes=[], costs={})
    assert same.recommended is None
    assert same.codec is None
    assert "nothing changes" in str(same)
    unknown = compare(now, predict(now, CODED), changes=[], costs={})
    assert unknown.break_even_bytes_per_s is None


def test_no_link_no_rate():
    now = replace(situation(), link=None)
    new = predict(now, CODED, costs={"fp16": HALF})
    assert break_even(now, new, costs={"fp16": HALF}) is None
