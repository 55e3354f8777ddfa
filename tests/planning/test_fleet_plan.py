"""Tests of plans for fleets that are not there, and of the speeds that they begin with."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.devices.fleet import emulate
from hetkit.errors import DeviceError, PlanError, SettingsError
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.fleet_plan import plan_fleet
from hetkit.planning.relative_speed import relative_speed
from hetkit.planning.task_profile import TaskProfile

PROFILE = TaskProfile(
    device="A100",
    amp="off",
    launch_s=0.01,
    sample_s=0.002,
    sizes=(8.0, 32.0),
    shapes=((1024, 1024), (1024,)),
)


def test_the_card_that_was_profiled_needs_no_ratio():
    speed = relative_speed(PROFILE, emulate("A100")[0], "off", {})
    assert (speed.least, speed.likely, speed.most) == (1.0, 1.0, 1.0)
    plan = plan_fleet(PROFILE, "1xA100", global_batch=64)
    assert plan.step_s == pytest.approx(PROFILE.compute.seconds(64, 64))
    assert plan.low_s == plan.high_s == plan.step_s
    assert plan.exposed_s == 0.0


def test_another_vendors_card_is_less_sure_than_one_of_the_same():
    def width(name):
        speed = relative_speed(PROFILE, emulate(name)[0], "off", {})
        assert speed.least < speed.likely < speed.most
        return speed.most / speed.least

    assert width("MI300X") > 2 * width("H100")


def test_a_given_pace_wins_over_the_catalogue_and_is_sure():
    plan = plan_fleet(PROFILE, "1xA100 + 1xV100", global_batch=64, pace={"A100": 1, "V100": 0.25})
    assert plan.speeds[1].least == plan.speeds[1].most == 0.25
    assert plan.compute_s == pytest.approx(0.114)
    assert plan.low_s == plan.high_s


def test_a_device_without_figures_asks_for_its_pace():
    cpu = replace(PROFILE, device="cpu")
    with pytest.raises(DeviceError, match=r"pace=\{'V100'"):
        plan_fleet(cpu, "1xV100", global_batch=8)
    assert plan_fleet(cpu, "1xV100", global_batch=8, pace={"V100": 20.0}).step_s > 0


def test_the_exchange_comes_from_the_link_and_the_codecs_bytes():
    def exposed(**changes):
        arguments = {"global_batch": 64, "link": "10MB/s"} | changes
        return plan_fleet(PROFILE, "2xA100", **arguments).exposed_s

    whole_s = ring_bytes(2, PROFILE.gradient_bytes) / 10e6
    assert exposed() == pytest.approx(whole_s)
    assert exposed(compression="fp16") == pytest.approx(whole_s / 2)
    assert exposed(link="20MB/s") == pytest.approx(whole_s / 2)
    assert exposed(link=None) == 0.0


def test_a_task_without_gradients_exchanges_nothing():
    plan = plan_fleet(replace(PROFILE, shapes=()), "2xA100", global_batch=64, link="1MB/s")
    assert plan.exposed_s == 0.0


def test_what_was_not_measured_is_said():
    notes = " ".join(plan_fleet(PROFILE, "1xA100 + 1xT4", global_batch=8, compression="int8").notes)
    assert "poor prior" in notes
    assert "no link" in notes
    assert "int8" in notes
    assert "memory" in notes


def test_memory_bounds_the_pass_and_a_model_that_does_not_fit_is_refused():
    heavy = replace(PROFILE, fixed_bytes=2e9, sample_bytes=1e9)
    plan = plan_fleet(heavy, "1xA100 + 1xV100", global_batch=128)
    assert plan.micro_batches[1] < plan.micro_batches[0] < plan.batches[0]
    assert max(plan.memory_bytes) < 40 * 2**30
    with pytest.raises(PlanError, match=r"V100 #1"):
        plan_fleet(replace(heavy, fixed_bytes=3e10), "1xA100 + 1xV100", global_batch=128)


def test_settings_are_checked_as_everywhere():
    with pytest.raises(SettingsError):
        plan_fleet(PROFILE, "1xA100", global_batch=8, amp="fp8")
    with pytest.raises(SettingsError, match="V100"):
        plan_fleet(PROFILE, "1xV100", global_batch=8, amp="bf16")


def test_it_shows_as_predicted_in_text_and_html():
    plan = plan_fleet(replace(PROFILE, emulated=True), "2xA100 + 1xT4", global_batch=32)
    for shown in (repr(plan), plan._repr_html_()):
        assert "predicted" in shown
        assert "emulated" in shown
        assert "T4 #2" in shown


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(["A100", "V100", "T4", "MI300X"]), min_size=1, max_size=4),
    batch=st.integers(8, 256),
    rate=st.floats(1e6, 1e11),
    error=st.floats(0.0, 0.1),
    amp=st.sampled_from(["off", "auto"]),
    compression=st.sampled_from(["none", "fp16", "int8"]),
)
def test_every_plan_uses_the_whole_batch_and_lies_in_its_interval(
    names, batch, rate, error, amp, compression
):
    plan = plan_fleet(
        replace(PROFILE, error=error),
        " + ".join(names),
        global_batch=batch,
        link=rate,
        amp=amp,
        compression=compression,
    )
    assert sum(plan.batches) == batch
    assert plan.low_s <= plan.step_s * (1 + 1e-9)
    assert plan.step_s <= plan.high_s * (1 + 1e-9)


def test_the_plan_and_its_verdict_count_the_same_parts():
    # The verdict left out what is not compute or exchange, and promised twice the plan's speed.
    busy = replace(PROFILE, data_s=0.0005, optimizer_s=0.02, other_s=0.03)
    plan = plan_fleet(busy, "2xA100 + 2xV100", global_batch=64, link="1GB/s")
    assert plan.verdict.balanced is not None
    assert plan.verdict.balanced.batches == plan.batches
    assert plan.verdict.balanced.step_s == pytest.approx(plan.step_s, rel=0.01)
    assert "a profile on A100" in plan.verdict.text
    assert "measured step times" not in str(plan.verdict)
