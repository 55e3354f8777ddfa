"""The course: how far the ranks may run, and under which plan. Decides; sends nothing.

One epoch, and where each kind of change gets in::

    orders    Plan ─ Grant ─ Grant ─ [Plan ─] Grant ─ … ─ Grant ─ EndEpoch ──▶ (reports) ─▶ Plan …
                ↑ settings of "next epoch"     ↑ settings of "next grant", the balancer's split

Grants reach about a second ahead of what is done, so that nobody waits for the next; a pause is
the absence of grants, a step is a grant of one, and a stop leaves all ranks at the same step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hetkit.devices.device import Device
from hetkit.errors import SessionError
from hetkit.plan import Plan
from hetkit.planning.schedule import Position, describe_changes, make_plan
from hetkit.settings import Settings

AHEAD_S = 1.0
"""How far grants reach ahead of what is done."""

_NEXT_GRANT = tuple(f.name for f in fields(Settings) if f.metadata["effect"] == "next grant")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPlan:
    """From ``plan.first_step`` on, ``plan`` is in force; ``changes`` says what a user switched."""

    plan: Plan
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantUntil:
    """Steps below ``until`` may be executed."""

    until: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishEpoch:
    """All steps of ``epoch`` were granted: validate, save, report."""

    epoch: int


Order = NewPlan | GrantUntil | FinishEpoch


class Course:
    """Keeps where the ranks stand and how far they may go.

    Args:
        devices: What runs the ranks, in rank order.
        settings: What the user wants at first.

    Attributes:
        settings: What the user wants now.
        applied: What is in force; None before the first plan.
        plan: The plan in force; None before the first, and between two epochs.
        balanced: The balancer's split, for ``batches="auto"``.
        target: The epoch at which the run ends.
        limit: The epoch at which an own loop comes to its end; None: it does not.
        ended: Whether an own loop has come to its end.

    Example:
        >>> from hetkit.devices.device import Device
        >>> course = Course([Device(name="cpu", kind="cpu", index=0, key="cpu:0")],
        ...                 Settings(global_batch=8))
        >>> course.stand(Position(epoch=0, step=0, epoch_first_step=0, samples=24), caps=None)
        >>> course.run(epochs=1)
        >>> [type(order).__name__ for order in course.orders(step_s=0.5)]
        ['NewPlan', 'GrantUntil']
        >>> course.granted
        2
    """

    def __init__(self, devices: Sequence[Device], settings: Settings) -> None:
        self.devices = tuple(devices)
        self.settings = settings
        self.applied: Settings | None = None
        self.plan: Plan | None = None
        self.balanced: tuple[int, ...] | None = None
        self.why_balanced = ""
        self.target = 0
        self.limit: int | None = None
        self.ended = False
        self.epoch = 0
        self.granted = 0
        self.paused = False
        self._position: Position | None = None
        self._caps: tuple[int | None, ...] | None = None
        self._done = [0] * len(self.devices)
        self._finishing = False
        self._active = False
        self._budget: int | None = None
        self._version = 0

    def stand(self, position: Position, caps: tuple[int | None, ...] | None) -> None:
        """All ranks stand ready at ``position``; whatever was granted before is void."""
        self._position = position
        self._caps = caps
        self.epoch = position.epoch
        self.granted = position.step
        self._done = [position.step] * len(self.devices)
        self.plan = None
        self._finishing = False

    def seat(self, devices: Sequence[Device], applied: Settings | None) -> None:
        """Other devices are to run the ranks; the settings were made to fit them."""
        self.devices = tuple(devices)
        self.applied = applied
        self.balanced, self.why_balanced = None, "other devices"
        self.plan = None
        self._caps = None
        self._done = [self.granted] * len(self.devices)

    def cap(self, rank: int, micro_batch: int) -> None:
        """A rank holds at most ``micro_batch`` samples; in force from the next grant on."""
        caps = list(self._caps or [None] * len(self.devices))
        caps[rank] = micro_batch
        self._caps = tuple(caps)

    @property
    def done(self) -> int:
        """Steps that all ranks have executed."""
        return min(self._done)

    @property
    def settled(self) -> bool:
        """Whether no rank is executing anything that was granted."""
        return self.done >= self.granted and not self._finishing

    @property
    def at_work(self) -> bool:
        """Whether a run has been asked for and has not ended."""
        return self._active

    @property
    def finished(self) -> bool:
        """Whether the run has reached its target, or has been stopped, and all ranks stand."""
        return self.settled and not self._active

    @property
    def epoch_first_step(self) -> int:
        """The first step of the present epoch."""
        return self._position.epoch_first_step if self._position else 0

    @property
    def samples(self) -> int:
        """Samples in the training set; 0 before it is known."""
        return self._position.samples if self._position else 0

    def run(self, epochs: int | None) -> None:
        """Asks for ``epochs`` more epochs from where the ranks stand; a begun one counts.

        None asks for all that an own loop has, or for one.
        """
        if epochs is None:
            epochs = 1 if self.limit is None else self.limit - self.epoch
        self.target = self._within_limit(self.epoch + epochs)
        self._active, self.paused, self._budget = True, False, None

    def pause(self) -> None:
        """Grants nothing more until `resume` or `take_steps`."""
        self.paused, self._budget = True, None

    def resume(self) -> None:
        """Grants on."""
        self.paused, self._budget = False, None

    def take_steps(self, steps: int) -> None:
        """Grants exactly ``steps`` more, past the run's last epoch if need be, and pauses there."""
        self.paused = True
        self._budget = max(self.granted, self._budget or 0) + steps

    def stop(self) -> None:
        """Ends the run where the last grant ends."""
        self._active, self.paused, self._budget = False, False, None

    def end(self) -> None:
        """An own loop has come to its end on all ranks: what was granted beyond is void."""
        self.stop()
        self.granted = self.done
        self._finishing = False
        self.ended = True

    def progress(self, rank: int, done: int) -> None:
        """A rank has executed all steps below ``done``."""
        self._done[rank] = max(self._done[rank], done)

    def end_epoch(self) -> None:
        """All ranks have reported the end of the epoch."""
        position = self._known_position()
        self.epoch += 1
        self._position = replace(
            position, epoch=self.epoch, step=self.granted, epoch_first_step=self.granted
        )
        self.plan = None
        self._finishing = False
        if self._budget is not None and self._budget > self.granted:
            self.target = max(self.target, self._within_limit(self.epoch + 1))
        if self.epoch >= self.target:
            self._active, self.paused, self._budget = False, False, None

    def balance(self, batches: tuple[int, ...], reason: str) -> None:
        """Takes the balancer's split, in force from the next grant on."""
        self.balanced, self.why_balanced = batches, reason

    def orders(self, step_s: float | None, hold_at: int | None = None) -> list[Order]:
        """Returns what to tell all ranks now, in this order.

        Args:
            step_s: The present duration of a step, for how far a second reaches; None: unknown,
                grants then reach two steps.
            hold_at: A step that no grant should pass yet: a decision is due there.
        """
        orders: list[Order] = []
        if not self._active or self._finishing or self._position is None:
            return orders
        limit = self._limit(step_s, hold_at)
        if limit <= self.granted:
            return orders
        new_plan = self._new_plan()
        if new_plan is not None:
            orders.append(new_plan)
        plan = self._known_plan()
        until = min(limit, plan.last_step + 1)
        if self._budget is None and plan.local:
            until = plan.next_sync(until - 1) + 1  # wherever the ranks rest, they stand alike
        if until > self.granted:
            self.granted = until
            orders.append(GrantUntil(until=until))
        if self.granted > plan.last_step:
            self._finishing = True
            orders.append(FinishEpoch(epoch=plan.epoch))
        return orders

    def _within_limit(self, epoch: int) -> int:
        return epoch if self.limit is None else min(epoch, self.limit)

    def _limit(self, step_s: float | None, hold_at: int | None) -> int:
        ahead = 2 if not step_s else max(2, math.ceil(AHEAD_S / step_s))
        limit = self.done + ahead
        if hold_at is not None:
            limit = min(limit, max(hold_at, self.done + 1))
        if self._budget is not None:
            return min(limit, self._budget)
        return self.granted if self.paused else limit

    def _new_plan(self) -> NewPlan | None:
        if self.plan is None:
            return self._plan_epoch()
        return self._replan()

    def _plan_epoch(self) -> NewPlan:
        position = self._known_position()
        # Fresh workers may stand in the middle of an epoch: its own settings stay in force.
        begun = position.step > position.epoch_first_step and self.applied is not None
        wanted = self._within_epoch() if begun else self.settings
        changes = describe_changes(self.applied, wanted)
        reason = "; ".join(changes) or self.why_balanced or "the epoch begins"
        self.plan = self._make(wanted, position, reason)
        self.applied = wanted
        return NewPlan(plan=self.plan, changes=changes)

    def _replan(self) -> NewPlan | None:
        plan, wanted = self._known_plan(), self._within_epoch()
        position = replace(self._known_position(), step=self.granted)
        changes = describe_changes(self.applied, wanted)
        fresh = self._make(wanted, position, "; ".join(changes) or self.why_balanced)
        same = (fresh.batches, fresh.micro_batches) == (plan.batches, plan.micro_batches)
        self.applied = wanted
        if same:
            self._version -= 1
            return None
        self.plan = fresh
        return NewPlan(plan=fresh, changes=changes)

    def _within_epoch(self) -> Settings:
        """Returns what is in force, with those of the user's changes that need not wait."""
        applied = self.applied or self.settings
        if self.settings.global_batch != applied.global_batch:
            return applied  # the new batches are for the new global batch
        return replace(applied, **{name: getattr(self.settings, name) for name in _NEXT_GRANT})

    def _make(self, settings: Settings, position: Position, reason: str) -> Plan:
        self._version += 1
        return make_plan(
            settings,
            self.devices,
            position,
            version=self._version,
            balanced=self.balanced,
            micro_caps=self._caps,
            reason=reason,
        )

    def _known_plan(self) -> Plan:
        if self.plan is None:
            raise SessionError("there is no plan yet: run() first.")
        return self.plan

    def _known_position(self) -> Position:
        if self._position is None:
            raise SessionError("the workers do not stand yet: run() first.")
        return self._position
