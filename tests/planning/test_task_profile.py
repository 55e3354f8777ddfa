"""Tests of the profile of a task: what it refuses, and that a file holds all of it."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.devices.fleet import emulate
from hetkit.errors import PlanError
from hetkit.plan import Plan
from hetkit.planning.curve import StepCurve
from hetkit.planning.situation import CodecCost, Parts, RankPace, Situation
from hetkit.planning.step_time import StepTime
from hetkit.planning.task_profile import TaskProfile

FACTS = {
    "device": "A100",
    "amp": "off",
    "launch_s": 0.01,
    "sample_s": 0.002,
    "sizes": (8.0, 32.0),
    "shapes": ((64, 64), (64,)),
}

seconds = st.floats(min_value=0.0, max_value=1e3)


@given(
    launch_s=seconds,
    sample_s=st.floats(min_value=1e-9, max_value=10.0),
    shapes=st.lists(st.lists(st.integers(0, 99), max_size=3).map(tuple), max_size=4).map(tuple),
    shares=st.lists(st.tuples(seconds, seconds), max_size=3).map(tuple),
    fixed=st.none() | seconds,
    costs=st.dictionaries(st.sampled_from(["int8", "topk(ratio=0.1)"]), seconds),
)
def test_a_file_holds_all_of_it(launch_s, sample_s, shapes, shares, fixed, costs):
    profile = TaskProfile(
        **{**FACTS, "launch_s": launch_s, "sample_s": sample_s, "shapes": shapes},
        ready_shares=shares,
        fixed_bytes=fixed,
        codec_element_s=costs,
    )
    assert TaskProfile.from_json(profile.to_json()) == profile


def test_save_and_load(tmp_path):
    profile = TaskProfile(**FACTS)
    assert TaskProfile.load(profile.save(tmp_path / "task.json")) == profile


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_s", 0.0),
        ("launch_s", -1.0),
        ("amp", "fp8"),
        ("optimizer_s", float("nan")),
        ("fixed_bytes", -1),
        ("shapes", ((-1,),)),
        ("element_bytes", 0),
    ],
)
def test_what_is_out_of_range_is_refused(name, value):
    with pytest.raises(PlanError, match=name if name != "amp" else "fp8"):
        TaskProfile(**{**FACTS, name: value})


@pytest.mark.parametrize("text", ["", "[]", "3", '{"format": 7}', '{"format": 1, "colour": "red"}'])
def test_what_is_no_profile_says_how_to_make_one(text):
    with pytest.raises(PlanError, match=r"hk\.profile"):
        TaskProfile.from_json(text)


def test_bytes_follow_from_the_shapes_and_missing_memory_is_a_dash():
    profile = TaskProfile(**FACTS)
    assert profile.tensor_bytes == (64 * 64 * 4, 256)
    assert profile.memory is None
    assert "–" in repr(profile)
    assert "emulated" in repr(TaskProfile(**FACTS, emulated=True))
    assert "<script" not in TaskProfile(**{**FACTS, "device": "<script>"})._repr_html_()
    assert json.loads(profile.to_json())["format"] == 1


@dataclass
class FakeTrial:
    """What a trial found, without workers."""

    costs: dict = field(default_factory=dict)
    shapes: tuple = ((10,), (10, 4))
    element_bytes: int = 4
    fixed_bytes: float = 1e6


PARTS = Parts(
    data_s=0.8, compute_s=1.0, wait_s=0, transfer_s=0, codec_s=0, optimizer_s=0.2, other_s=0.0
)


def situation(models, **emulation):
    plan = Plan(
        version=1,
        epoch=0,
        first_step=0,
        epoch_first_step=0,
        epoch_steps=10,
        global_batch=16,
        batches=(8, 8),
        micro_batches=(4, 4),
        amp=("off", "off"),
        compression="none",
    )
    ranks = [RankPace(model=m, error=0.01, jitter=0.0, sizes=(4.0, 8.0)) for m in models]
    devices = emulate("1xA100 + 1xV100", **emulation).devices
    return Situation(plan=plan, devices=devices, ranks=tuple(ranks), parts=PARTS, step_error_s=0.0)


def test_a_session_gives_the_profile_of_its_slowest_device():
    now = situation([StepTime(launch_s=0.0, sample_s=c) for c in (0.1, 0.3)])
    cost = CodecCost(element_s=1e-9, element_error=0.0, ring_share=0.25, half_rounds=2)
    profile = TaskProfile.of(now, FakeTrial(costs={"int8": cost}), [2e6, 3e6], {"none": cost})
    assert (profile.device, profile.emulated, profile.sample_s) == ("V100", True, 0.3)
    assert profile.data_s == 0.1
    assert profile.shapes == ((10, 4), (10,))
    assert profile.memory.bytes(4) == 3e6
    assert profile.codec_element_s == {"int8": 1e-9}
    assert profile.samples == 160


def test_times_of_an_emulated_device_are_its_own_seconds():
    now = situation([StepTime(launch_s=0.2, sample_s=c) for c in (0.1, 0.3)], time_scale=10.0)
    profile = TaskProfile.of(now, FakeTrial(), [])
    assert (profile.launch_s, profile.sample_s) == pytest.approx((0.02, 0.03))
    assert profile.memory is None


def test_a_bent_time_becomes_the_line_through_the_present_size():
    curve = StepCurve(sizes=(0.0, 2.0, 4.0), times=(1.0, 1.2, 3.0))
    now = situation([StepTime(launch_s=0.0, sample_s=0.01), curve])
    profile = TaskProfile.of(now, FakeTrial(), [])
    assert profile.compute.seconds(8, 4) == pytest.approx(curve.seconds(8, 4))
