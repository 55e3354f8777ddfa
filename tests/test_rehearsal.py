"""Tests of a task's profile, measured in real processes, and of the plan that follows from it."""

import pytest
import torch

import hetkit as hk
from hetkit.devices.fleet import emulate

LIMIT_S = 60.0


def make_task(samples=640):
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(samples, 8, generator=draw), torch.randn(samples, 1, generator=draw)
    return hk.Task(
        model=lambda: torch.nn.Linear(8, 1),
        data=data,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def test_an_emulated_cards_own_times_are_found_and_carried_over(tmp_path):
    fleet = emulate("2xV100", sample_s=0.002, launch_s=0.02)
    profile = hk.profile(make_task(), fleet, batch=32, timeout_s=LIMIT_S)
    assert (profile.device, profile.emulated, profile.amp) == ("V100", True, "off")
    assert profile.shapes == ((1, 8), (1,))
    assert profile.sizes == (8.0, 32.0)
    # The pass as a whole is emulated; how it falls into a + c·b is up to two measured sizes.
    assert profile.compute.seconds(32, 32) == pytest.approx(0.02 + 32 * 0.002, rel=0.25)
    again = hk.TaskProfile.load(profile.save(tmp_path / "task.json"))
    assert again == profile
    plan = hk.plan_fleet(again, "2xV100", global_batch=64, link="1GB/s")
    assert plan.batches == (32, 32)
    fetched_s = 32 * profile.data_s
    assert plan.compute_s == pytest.approx(profile.compute.seconds(32, 32) + fetched_s)


def test_an_epoch_may_end_in_between():
    profile = hk.profile(
        make_task(112), emulate("1xV100", sample_s=0.001), batch=8, timeout_s=LIMIT_S
    )
    assert profile.sizes == (2.0, 8.0)


def test_too_few_steps_in_an_epoch_are_refused():
    with pytest.raises(hk.SettingsError, match="smaller batch"):
        hk.profile(make_task(64), emulate("1xV100", sample_s=0.001), batch=32, timeout_s=LIMIT_S)


def test_a_loop_of_ones_own_has_no_profile():
    with pytest.raises(hk.SettingsError, match=r"hetkit\.Task"):
        hk.profile(lambda worker: None)


def test_the_tasks_own_error_arrives():
    def loss(model, batch):
        raise RuntimeError("my loss is broken")

    task = make_task()
    broken = hk.Task(model=task.model, data=task.data, loss=loss, optimizer=task.optimizer)
    with pytest.raises(RuntimeError, match="my loss is broken"):
        hk.profile(broken, emulate("1xV100", sample_s=0.001), batch=8, timeout_s=LIMIT_S)
