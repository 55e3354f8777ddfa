"""View: what can be seen of a session. Reading changes nothing, from any thread, in any state."""

import functools
import os
import time
import weakref
from importlib.metadata import entry_points

from hetkit.coordinator import Coordinator
from hetkit.devices.fleet import Fleet
from hetkit.devices.seats import Seats
from hetkit.errors import SessionError
from hetkit.launch.output import OutputLog
from hetkit.plan import Plan
from hetkit.planning.verdict import Verdict, judge
from hetkit.records.decisions import Decisions
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.records.status import Progress, State
from hetkit.records.waiting import describe
from hetkit.settings import Settings


@functools.cache
def _living(pid: int) -> "weakref.WeakSet[View]":
    # By pid, since a forked process inherits this cache but not its parent's workers.
    return weakref.WeakSet()


def sessions() -> "list[View]":
    """Returns this process's sessions that are not closed yet, oldest first.

    A notebook's cell that makes a session anew leaves the one before it training: close it here.

    Example:
        >>> import hetkit as hk
        >>> for session in hk.sessions():
        ...     session.close()
        >>> hk.sessions()
        []
    """
    alive = [session for session in _living(os.getpid()) if session.state != "closed"]
    return sorted(alive, key=lambda session: session.made_at)


class View:
    """What can be seen of a session, in a notebook's cell, by a script or by the dashboard.

    Args:
        name: What messages call the session.
        fleet: The devices, in rank order.
        coordinator: What runs the session's workers.
    """

    def __init__(self, name: str, fleet: Fleet, coordinator: Coordinator) -> None:
        self.dashboard: object = None
        _living(os.getpid()).add(self)
        self.made_at = time.time()
        self._name = name
        self._fleet = fleet
        self._seats = Seats(fleet, name)
        self._coordinator = coordinator

    @property
    def settings(self) -> Settings:
        """What was asked for; `applied` is what is in force."""
        return self._coordinator.course.settings

    @property
    def applied(self) -> Settings | None:
        """The settings in force; None before the first step."""
        return self._coordinator.status.applied

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first step."""
        return self._coordinator.status.plan

    @property
    def state(self) -> State:
        """``new, starting, ready, running, paused, recovering, failed`` or ``closed``."""
        return self._coordinator.status.state

    @property
    def error(self) -> BaseException | None:
        """What made the session fail; None otherwise."""
        return self._coordinator.status.error

    @property
    def progress(self) -> Progress:
        """How far the training is."""
        return self._coordinator.status.progress

    @property
    def devices(self) -> Fleet:
        """All devices of the session; history and ledger name them by their place in here."""
        return self._fleet

    @property
    def ranks(self) -> tuple[int, ...]:
        """The places in `devices` of those that train, in rank order; see `Session.use`."""
        return self._seats.places

    @property
    def history(self) -> History:
        """What was measured, per step and rank."""
        return self._coordinator.book.history

    @property
    def ledger(self) -> Ledger:
        """One row per epoch."""
        return self._coordinator.book.ledger

    @property
    def decisions(self) -> Decisions:
        """What the balancer decided and why, and what each new split then gained."""
        return self._coordinator.scales.decisions

    @property
    def output(self) -> OutputLog:
        """What the workers printed."""
        return self._coordinator.output

    def verdict(self) -> Verdict:
        """Compares all devices, the best subset and the fastest alone, from measured step times.

        Raises:
            SessionError: Too few steps have been measured yet.
        """
        scales, plan = self._coordinator.scales, self.plan
        models = scales.models()
        if models is None or plan is None or not len(models) == plan.world_size == len(self.ranks):
            raise SessionError("too few steps have been measured for a verdict: run() a few more.")
        amp = " + ".join(dict.fromkeys(plan.amp))
        holds_for = f"global batch {plan.global_batch}, amp {amp}, compression {plan.compression}"
        return judge(
            [self._fleet.labels[place] for place in self.ranks],
            models,
            plan.global_batch,
            micro_batches=plan.micro_batches,
            comm_s=scales.exchange_s,
            emulated=self._fleet.emulated,
            error=scales.error,
            holds_for=holds_for,
        )

    def _ipython_display_(self) -> None:
        for entry in entry_points(group="hetkit.display"):
            entry.load()(self)
            return
        raise NotImplementedError

    def __repr__(self) -> str:
        labels = ", ".join(self._fleet.labels)
        return f"<hetkit.Session {self._name} on {labels}: {describe(self._coordinator.status)}>"
