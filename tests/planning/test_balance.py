import pytest

from hetkit.plan import Plan
from hetkit.planning.balance import DROPPED_STEPS, WINDOW_STEPS, Balance
from hetkit.planning.step_time import Observation


def plan(*batches: int) -> Plan:
    return Plan(
        version=1,
        epoch=0,
        first_step=0,
        epoch_first_step=0,
        epoch_steps=1000,
        global_batch=sum(batches),
        batches=batches,
        micro_batches=(sum(batches),) * len(batches),
        amp=("off",) * len(batches),
        compression="none",
    )


def seen(batch: int, seconds: float) -> Observation:
    return Observation(batch=batch, micro_steps=1, compute_s=seconds)


def fill(balance: Balance, first: int, *ranks: Observation | None) -> int:
    """Adds steps from ``first`` on until a window is full; returns the step after."""
    step = first
    while not balance.full:
        balance.add(step, ranks)
        step += 1
    return step


def test_the_first_steps_after_a_change_do_not_count():
    balance = Balance()
    balance.restart(first_step=10)
    for step in range(8, 10 + DROPPED_STEPS):
        balance.add(step, [seen(32, 9.0), seen(32, 9.0)])
    end = fill(balance, 10 + DROPPED_STEPS, seen(32, 0.1), seen(32, 0.3))
    assert end == 10 + DROPPED_STEPS + WINDOW_STEPS
    assert balance.decide(plan(32, 32)).batches == (48, 16)


def test_no_grant_goes_past_a_window_until_two_decisions_were_made():
    balance = Balance()
    balance.restart(first_step=0)
    first_end = DROPPED_STEPS + WINDOW_STEPS
    assert balance.warm_until == first_end
    assert fill(balance, 0, seen(32, 0.1), seen(32, 0.1)) == first_end
    assert balance.decide(plan(32, 32)).batches is None
    assert balance.warm_until == first_end + WINDOW_STEPS, "the next window, not the one behind"
    assert fill(balance, first_end, seen(32, 0.1), seen(32, 0.1)) == first_end + WINDOW_STEPS
    balance.decide(plan(32, 32))
    assert balance.warm_until is None


def test_a_window_that_only_teaches_counts_as_no_decision():
    balance = Balance()
    balance.restart(first_step=0)
    assert balance.models() is None
    fill(balance, 0, seen(32, 0.1), seen(32, 0.3))
    balance.learn(plan(32, 32))
    assert not balance.full
    fast, slow = balance.models()
    assert slow.seconds(32, 32) == pytest.approx(3 * fast.seconds(32, 32))
    assert balance.warm_until is not None


def test_a_rank_without_samples_leaves_no_model():
    balance = Balance()
    balance.restart(first_step=0)
    fill(balance, 0, seen(64, 0.1), None)
    balance.learn(plan(64, 0))
    assert balance.models() is None
    fill(balance, 100, seen(32, 0.05), seen(32, 0.1))
    balance.learn(plan(32, 32))
    assert len(balance.models()) == 2


def test_forgetting_starts_the_warm_up_again():
    balance = Balance()
    balance.restart(first_step=0)
    end = fill(balance, 0, seen(32, 0.1), seen(32, 0.1))
    balance.decide(plan(32, 32))
    fill(balance, end, seen(32, 0.1), seen(32, 0.1))
    balance.decide(plan(32, 32))
    balance.forget()
    balance.restart(first_step=40)
    assert balance.models() is None
    assert balance.warm_until == 40 + DROPPED_STEPS + WINDOW_STEPS


def test_known_devices_need_no_second_warm_up():
    balance = Balance()
    balance.restart(first_step=0)
    end = fill(balance, 0, seen(32, 0.1), seen(32, 0.2), seen(32, 0.4))
    balance.decide(plan(32, 32, 32))
    assert balance.error == 0.0
    balance.seat([0, 2])
    balance.restart(end)
    fast, slow = balance.models()
    assert slow.seconds(32, 32) == pytest.approx(4 * fast.seconds(32, 32))
    assert balance.warm_until is None
    assert not balance.undecided


def test_a_new_device_begins_the_warm_up_again():
    balance = Balance()
    balance.restart(first_step=0)
    end = fill(balance, 0, seen(32, 0.1), seen(32, 0.2))
    balance.decide(plan(32, 32))
    balance.seat([0, None, 1])
    balance.restart(end)
    assert balance.models() is None
    assert balance.undecided
    assert balance.warm_until == end + DROPPED_STEPS + WINDOW_STEPS


def test_devices_that_change_before_anything_was_measured_are_unknown():
    balance = Balance()
    balance.seat([1])
    balance.restart(0)
    assert balance.models() is None
    assert balance.undecided
