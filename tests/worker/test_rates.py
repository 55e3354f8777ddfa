import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import TaskError
from hetkit.worker.rates import LearningRate


def make(scheduler=None, **groups) -> tuple[torch.optim.Optimizer, LearningRate]:
    parameters = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in groups.values()
    ]
    optimizer = torch.optim.SGD(parameters, lr=9.0)
    return optimizer, LearningRate(optimizer, scheduler)


def now(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def warming(optimizer):
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        ],
        milestones=[2],
    )


def test_a_number_sets_every_group_a_factor_scales_each_and_none_gives_them_back():
    optimizer, rate = make(body=0.1, head=1.0)
    rate.override(0.3, None)
    assert now(optimizer) == [0.3, 0.3]
    rate.override(None, 0.5)
    assert now(optimizer) == [0.05, 0.5]
    rate.override(None, 0.5)
    assert now(optimizer) == [0.05, 0.5], "a factor of the task's own, not of what is in force"
    rate.override(None, None)
    assert now(optimizer) == [0.1, 1.0]


@pytest.mark.parametrize("scheduler", [halving, warming])
def test_the_scheduler_goes_its_way_under_any_override(scheduler):
    plain, _ = make(a=0.1)
    steps = scheduler(plain)
    optimizer, rate = make(scheduler, a=0.1)
    for lr, factor in [(None, None), (7.0, None), (None, 0.25), (None, None)] * 2:
        rate.override(lr, factor)
        own = now(plain)[0]
        assert now(optimizer)[0] == pytest.approx(lr or own * (factor or 1.0))
        rate.end_epoch()
        plain.step()
        steps.step()


@pytest.mark.parametrize("scheduler", [None, halving, warming])
def test_a_checkpoint_goes_on_where_it_was_even_from_under_an_override(scheduler):
    first_optimizer, first = make(scheduler, a=0.1)
    first.end_epoch()
    first.override(5.0, None)
    second_optimizer, second = make(scheduler, a=0.1)
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    for rate in (first, second):
        rate.override(None, None)
    for _ in range(4):
        assert now(second_optimizer) == now(first_optimizer)
        first.end_epoch()
        second.end_epoch()


def test_a_checkpoint_with_a_scheduler_loads_into_a_task_without_one():
    _, first = make(halving, a=0.1)
    first.end_epoch()
    optimizer, second = make(a=0.1)
    second.load_state_dict(first.state_dict())
    second.override(None, None)
    assert now(optimizer) == [0.05]


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)


@pytest.mark.parametrize("scheduler", [halving, warming, one_cycle])
def test_a_scheduler_by_steps_moves_with_each_and_under_an_override(scheduler):
    plain, _ = make(a=0.1)
    steps = scheduler(plain)
    optimizer, _ = make(a=0.1)
    rate = LearningRate(optimizer, scheduler, per="step")
    for lr, factor in [(None, None), (7.0, None), (None, 0.25), (None, None)]:
        rate.override(lr, factor)
        for _ in range(3):
            assert rate.now == pytest.approx(lr or now(plain)[0] * (factor or 1.0))
            rate.end_step()
            plain.step()
            steps.step()
        rate.end_epoch()


def test_a_scheduler_that_wants_a_measurement_is_refused_with_what_to_do_instead():
    with pytest.raises(TaskError, match=r"ReduceLROnPlateau wants a measurement.*session\.set"):
        make(torch.optim.lr_scheduler.ReduceLROnPlateau, a=0.1)


def test_a_scheduler_by_epochs_stands_still_within_one():
    optimizer, rate = make(halving, a=0.1)
    rate.end_step()
    assert now(optimizer) == [0.1]


@given(first=st.integers(1, 4096), later=st.integers(1, 4096))
def test_a_rule_is_relative_to_the_trainings_first_global_batch(first, later):
    _, rate = make(a=0.1)
    assert rate.rule_factor("linear", first) is None
    linear, root = rate.rule_factor("linear", later), rate.rule_factor("sqrt", later)
    assert rate.rule_factor("none", later) is None
    if later == first:
        assert linear is root is None
    else:
        assert linear == later / first
        assert root**2 == pytest.approx(linear)
    _, again = make(a=0.1)
    again.load_state_dict(rate.state_dict())
    assert again.rule_factor("linear", later) == linear, "a checkpoint knows the first one"
