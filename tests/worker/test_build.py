from dataclasses import replace

import pytest
import torch

import hetkit as hk
from hetkit.devices.fleet import parse_fleet
from hetkit.errors import TaskError
from hetkit.launch.messages import Join
from hetkit.worker.build import CALIBRATION_MARGIN, SHORTEST_STEP_S, build_parts, calibrated


def make_task(model=lambda: torch.nn.Linear(4, 2)) -> hk.Task:
    return hk.Task(
        model=model,
        data=torch.ones(16, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def make_join(fleet, rank: int = 0, **given) -> Join:
    values = {
        "rank": rank,
        "world_size": len(fleet),
        "generation": 1,
        "backend": "gloo",
        "devices": tuple(fleet),
        "payload": "",
        "seed": 5,
        "global_batch": 8,
        "threads": torch.get_num_threads(),
    }
    return Join(**{**values, **given})


def test_every_rank_builds_the_same_model_under_the_sessions_seed():
    fleet = hk.emulate("2xV100", sample_s=1e-3)
    states = []
    for rank in (0, 1):
        torch.manual_seed(1000 + rank)
        states.append(build_parts(make_join(fleet, rank), make_task()).model.weight)
    assert torch.equal(*states)
    other = build_parts(make_join(fleet, seed=6), make_task()).model.weight
    assert not torch.equal(states[0], other)


def test_a_module_is_taken_as_it_is_and_anything_else_refused():
    fleet = hk.emulate("1xV100", sample_s=1e-3)
    module = torch.nn.Linear(4, 2)
    assert build_parts(make_join(fleet), make_task(module.train())).model is module
    with pytest.raises(TaskError, match="returned dict"):
        build_parts(make_join(fleet), make_task(dict))


def test_calibration_leaves_a_margin_over_the_real_compute():
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.0}, time_scale=2.0)
    join = make_join(fleet)
    parts = build_parts(join, make_task())
    for real_s in (1e-6, 0.5):
        slow = replace(parts, probe=replace(parts.probe, sample_s=real_s))
        emulation = calibrated(join, slow, None).emulation
        sample_s = emulation.sample_s * emulation.time_scale
        longest = max(CALIBRATION_MARGIN * real_s * 2.0, SHORTEST_STEP_S * 2 / 4)
        assert sample_s == pytest.approx(longest)
        assert sample_s / emulation.pace >= CALIBRATION_MARGIN * real_s


def test_what_was_given_is_not_calibrated_and_memory_is_measured():
    fleet = hk.emulate("1xV100", sample_s=0.25)
    join = make_join(fleet)
    parts = build_parts(join, make_task())
    emulation = calibrated(join, parts, None).emulation
    assert emulation.sample_s == 0.25
    assert emulation.fixed_bytes == 3 * 4 * (4 * 2 + 2), "weights, gradients, momentum"
    assert emulation.sample_bytes == parts.probe.sample_bytes > 0


def test_a_real_device_is_left_alone():
    (cpu,) = parse_fleet("cpu*1")
    join = make_join([cpu])
    assert calibrated(join, build_parts(join, make_task()), None) is cpu
