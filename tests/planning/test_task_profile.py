"""Tests of the profile of a task: what it refuses, and that a file holds all of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import PlanError
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
