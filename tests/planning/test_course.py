"""The course, driven by any sequence of commands and of progress."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from hetkit.devices.device import Device
from hetkit.errors import SessionError
from hetkit.planning.course import Course, FinishEpoch, GrantUntil, NewPlan
from hetkit.planning.schedule import Position
from hetkit.settings import Settings

RANKS = 3
DEVICES = [Device(name="cpu", kind="cpu", index=i, key=f"cpu:{i}") for i in range(RANKS)]


def course(samples: int = 100, global_batch: int = 10, **settings) -> Course:
    made = Course(DEVICES, Settings(global_batch=global_batch, **settings))
    made.stand(Position(epoch=0, step=0, epoch_first_step=0, samples=samples), caps=None)
    return made


def execute(made: Course) -> None:
    for rank in range(RANKS):
        made.progress(rank, made.granted)


def finish_epoch(made: Course) -> None:
    while not any(isinstance(order, FinishEpoch) for order in made.orders(0.01)):
        execute(made)
    execute(made)
    made.end_epoch()


def test_the_ranks_rest_where_they_stand_alike_unless_a_step_is_asked_for():
    made = course(sync_every=4)
    made.run(epochs=1)
    made.orders(0.4)
    assert made.granted == 4
    execute(made)
    made.orders(0.1)
    assert made.granted == 10, "the epoch's last step ends a window too"
    made = course(sync_every=4)
    made.run(epochs=1)
    made.take_steps(2)
    made.orders(0.01)
    assert made.granted == 2


class AnyCourse(RuleBasedStateMachine):
    """Checks every order that the course gives against what was asked for so far."""

    def __init__(self) -> None:
        super().__init__()
        self.course = course(samples=73)
        self.course.run(epochs=2)
        self.granted = 0
        self.version = 0
        self.budget: int | None = None
        self.plan = None
        self.finished: list[int] = []
        self.done = [0] * RANKS

    @rule(epochs=st.integers(1, 3))
    def run(self, epochs):
        if self.course.finished:
            self.course.run(epochs)
            self.budget = None

    @rule()
    def pause(self):
        self.course.pause()
        self.budget = self.granted

    @rule()
    def resume(self):
        self.course.resume()
        self.budget = None

    @rule(steps=st.integers(1, 9))
    def take_steps(self, steps):
        waiting = max(self.granted, self.budget or 0) if self.course.paused else self.granted
        self.course.take_steps(steps)
        self.budget = waiting + steps

    @rule()
    def stop(self):
        self.course.stop()
        self.budget = None

    @rule(
        change=st.sampled_from(
            [
                {"batches": "even"},
                {"batches": [5.0, 1.0, 1.0]},
                {"micro_batch": 2},
                {"global_batch": 7, "batches": "auto"},
                {"global_batch": 20, "batches": "auto"},
                {"compression": "fp16"},
                {"clip_norm": 1.0},
            ]
        )
    )
    def change(self, change):
        self.course.settings = self.course.settings.change(**{"batches": "auto", **change})

    @rule(batches=st.sampled_from([(1, 2, 7), (8, 1, 1), (4, 3, 3)]))
    def balance(self, batches):
        self.course.balance(batches, "measured")

    @rule(
        step_s=st.sampled_from([None, 0.01, 0.3, 5.0]),
        ahead=st.one_of(st.none(), st.integers(0, 9)),
    )
    def orders(self, step_s, ahead):
        hold_at = None if ahead is None else self.course.done + ahead
        for order in self.course.orders(step_s, hold_at):
            match order:
                case NewPlan(plan=plan):
                    self.check_plan(plan)
                case GrantUntil(until=until):
                    assert self.plan is not None
                    assert self.granted < until <= self.plan.last_step + 1
                    assert self.course.at_work
                    if hold_at is not None:
                        assert until <= max(hold_at, min(self.done) + 1)
                    if self.course.paused:
                        assert self.budget is not None
                        assert until <= self.budget
                    self.granted = until
                case FinishEpoch(epoch=epoch):
                    assert self.granted == self.plan.last_step + 1
                    assert epoch == len(self.finished)
                    self.finished.append(epoch)
                    self.plan = None

    def check_plan(self, plan):
        assert plan.version == self.version + 1
        assert plan.first_step == self.granted
        assert plan.epoch == len(self.finished)
        if plan.first_step != plan.epoch_first_step:
            whole = ("epoch_first_step", "global_batch", "compression", "clip_norm", "epoch_steps")
            assert self.plan is not None
            assert all(getattr(plan, name) == getattr(self.plan, name) for name in whole)
        self.version = plan.version
        self.plan = plan

    @precondition(lambda self: min(self.done) < self.granted)
    @rule(rank=st.integers(0, RANKS - 1), steps=st.integers(1, 20))
    def progress(self, rank, steps):
        self.done[rank] = min(self.granted, self.done[rank] + steps)
        self.course.progress(rank, self.done[rank])

    @precondition(lambda self: min(self.done) < self.granted)
    @rule()
    def execute(self):
        for rank in range(RANKS):
            self.progress(rank, self.granted)

    @precondition(lambda self: self.course.epoch < len(self.finished))
    @rule()
    def reports(self):
        self.execute()
        active, stopped = self.course.at_work, self.budget is None
        self.course.end_epoch()
        assert self.course.epoch == len(self.finished)
        assert self.course.epoch_first_step == self.granted
        if active and not stopped and self.budget > self.granted:
            assert self.course.at_work, "steps that were asked for are left"
        if not self.course.at_work:
            self.budget = None

    @invariant()
    def agrees(self):
        assert self.course.granted == self.granted
        assert self.course.done == min(self.done)
        assert not (self.course.settled and self.course.done < self.granted)


TestAnyCourse = AnyCourse.TestCase


def test_a_run_grants_every_step_once_and_ends():
    made = course(samples=95)
    made.run(epochs=2)
    finish_epoch(made)
    assert not made.finished
    finish_epoch(made)
    assert made.finished
    assert made.orders(0.01) == []
    assert (made.epoch, made.granted) == (2, 20)


def test_steps_are_exact_even_past_the_end_of_an_epoch():
    made = course(samples=40)  # four steps an epoch
    made.run(epochs=1)
    made.take_steps(6)
    finish_epoch(made)
    assert made.at_work
    made.orders(0.01)
    assert made.granted == 6
    execute(made)
    assert made.settled
    assert made.orders(0.01) == []
    made.resume()
    finish_epoch(made)
    assert made.finished
    assert made.granted == 8


def test_steps_that_end_with_the_epoch_end_the_run():
    made = course(samples=40)
    made.run(epochs=1)
    made.take_steps(4)
    finish_epoch(made)
    assert made.finished


def test_grants_reach_a_second_ahead_and_at_least_two_steps():
    for step_s, granted in ((None, 2), (0.25, 4), (10.0, 2), (0.09, 12)):
        made = course(samples=1000)
        made.run(1)
        made.orders(step_s)
        assert made.granted == granted


def test_settings_of_the_next_epoch_wait_for_it_and_those_of_the_next_grant_do_not():
    made = course()
    made.run(2)
    made.orders(0.5)
    made.settings = made.settings.change(batches=[5, 4, 1], compression="fp16", clip_norm=1.0)
    execute(made)
    (new, _) = made.orders(0.5)
    assert new.changes == ("batches: auto → [5, 4, 1]",)
    assert (new.plan.batches, new.plan.compression) == ((5, 4, 1), "none")
    assert made.applied == replace(made.settings, compression="none", clip_norm=None)
    finish_epoch(made)
    new = made.orders(0.5)[0]
    assert (new.plan.compression, new.plan.clip_norm) == ("fp16", 1.0)
    assert made.applied == made.settings


def test_batches_for_a_new_global_batch_come_with_it():
    made = course(samples=100)
    made.run(2)
    made.orders(0.5)
    made.settings = made.settings.change(batches=[10, 5, 5], global_batch=20)
    execute(made)
    assert [type(order) for order in made.orders(0.5)] == [GrantUntil]
    finish_epoch(made)
    plan = made.orders(0.5)[0].plan
    assert (plan.batches, plan.epoch_steps, plan.epoch_first_step) == ((10, 5, 5), 5, 10)


def test_a_change_that_changes_nothing_makes_no_plan():
    made = course(global_batch=9)
    made.run(1)
    made.orders(0.5)
    made.settings = made.settings.change(batches="even", micro_batch=9)
    execute(made)
    assert [type(order) for order in made.orders(0.5)] == [GrantUntil]
    assert made.applied == made.settings


def test_fresh_workers_in_the_middle_of_an_epoch_go_on_under_its_own_settings():
    made = course()
    made.run(1)
    made.orders(0.5)
    execute(made)
    made.stop()
    made.settings = made.settings.change(global_batch=50, compression="fp16", micro_batch=2)
    made.stand(Position(epoch=0, step=2, epoch_first_step=0, samples=100), caps=None)
    made.run(1)
    plan = made.orders(0.5)[0].plan
    assert (plan.first_step, plan.global_batch, plan.compression) == (2, 10, "none")
    finish_epoch(made)
    made.run(1)
    plan = made.orders(0.5)[0].plan
    assert (plan.global_batch, plan.compression, plan.micro_batches) == (50, "fp16", (2, 2, 2))


def test_after_a_rollback_the_same_steps_are_granted_again():
    made = course()
    made.run(1)
    made.take_steps(5)
    made.orders(0.1)
    execute(made)
    assert made.granted == 5
    made.stand(Position(epoch=0, step=0, epoch_first_step=0, samples=100), caps=(None, 4, None))
    assert (made.done, made.granted) == (0, 0)
    new = made.orders(0.1)[0]
    assert (new.plan.first_step, new.plan.version) == (0, 2)
    assert new.plan.micro_batches == (10, 4, 10)
    assert made.granted == 5, "the steps that were asked for, no more"


@given(hold=st.integers(0, 30))
def test_a_hold_lets_one_step_pass_at_least(hold):
    made = course(samples=1000)
    made.run(1)
    for _ in range(40):
        made.orders(0.01, hold_at=hold)
        assert made.granted <= max(hold, made.done + 1)
        assert made.granted > made.done
        execute(made)


def test_nothing_is_ordered_before_the_workers_stand():
    made = Course(DEVICES, Settings(global_batch=10))
    assert (made.samples, made.epoch_first_step) == (0, 0)
    made.run(1)
    assert made.orders(0.1) == []
    with pytest.raises(SessionError, match="do not stand"):
        made.end_epoch()


def test_an_own_loop_is_run_to_its_last_epoch_and_no_further():
    course = Course(DEVICES, Settings(global_batch=8))
    course.limit = 2
    course.stand(Position(epoch=0, step=0, epoch_first_step=0, samples=8), caps=None)
    course.run(None)
    assert course.target == 2
    course.run(5)
    assert course.target == 2


def test_an_own_loop_that_ends_early_voids_what_was_granted():
    course = Course(DEVICES, Settings(global_batch=8))
    course.stand(Position(epoch=0, step=0, epoch_first_step=0, samples=80), caps=None)
    course.run(1)
    course.orders(step_s=0.1)
    assert course.granted > 3
    for rank in range(len(DEVICES)):
        course.progress(rank, 3)
    course.end()
    assert course.ended
    assert course.finished
    assert course.granted == course.done == 3
    assert course.orders(step_s=0.1) == []
