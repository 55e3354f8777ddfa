"""How the widgets are wired to a session: what they ask of it, and callbacks that cannot hurt.

ipywidgets keeps every widget, and with it every callback, until it is closed. A callback that held
the session would keep its workers' devices busy after the user dropped it, so callbacks are held
`weakly`. And whatever a callback raises or prints vanishes in JupyterLab (EVIDENCE.md §5), so each
goes through `attempt`, which hands the message to the dashboard's status line.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from hetkit.devices.device import Device
from hetkit.errors import HetkitError
from hetkit.plan import Plan
from hetkit.planning.comparison import WhatIf
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.settings import Settings

_logger = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Takes the message for the status line; the empty text clears it."""


class ProgressLike(Protocol):
    """How far the training is. Epochs and steps count from 0 over the whole session."""

    @property
    def epoch(self) -> int:
        """The epoch being trained."""

    @property
    def epochs_target(self) -> int:
        """The epoch at which the run ends."""

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def epoch_first_step(self) -> int:
        """The epoch's first step."""

    @property
    def epoch_steps(self) -> int:
        """Steps in the epoch."""

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of the run."""


class OutputLike(Protocol):
    """What the workers printed."""

    def tail(self, rank: int, lines: int) -> str:
        """Returns the last lines of one rank's output."""


class SessionLike(Protocol):
    """What the dashboard asks of a session.

    All methods but `what_if` return at once, or raise a HetkitError.
    """

    dashboard: object
    """Kept here by `hetkit.widgets.dashboard.show`; None before."""

    @property
    def state(self) -> str:
        """One of the states of DESIGN.md §4."""

    @property
    def devices(self) -> Sequence[Device]:
        """All devices, by the places that the history names them by."""

    @property
    def ranks(self) -> Sequence[int]:
        """The places of the devices that train, in rank order."""

    @property
    def history(self) -> History:
        """What happened, per step and rank."""

    @property
    def ledger(self) -> Ledger:
        """One row per epoch."""

    @property
    def settings(self) -> Settings:
        """The settings that were asked for."""

    @property
    def applied(self) -> Settings | None:
        """The settings in force; None before the start."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the start."""

    @property
    def progress(self) -> ProgressLike:
        """How far the training is."""

    @property
    def error(self) -> BaseException | None:
        """Why the session failed."""

    @property
    def output(self) -> OutputLike:
        """What the workers printed."""

    def run(self, epochs: int) -> Any:
        """Trains."""

    def pause(self) -> Any:
        """Stops granting steps."""

    def resume(self) -> Any:
        """Grants steps again."""

    def step(self, n: int = 1) -> Any:
        """Grants ``n`` steps."""

    def stop(self) -> Any:
        """Ends the run."""

    def set(self, **changes: Any) -> Any:
        """Requests other settings."""

    def what_if(self, **changes: Any) -> WhatIf:
        """Predicts a step under other settings. It may wait for the workers."""


def attempt(action: Callable[[], object], report: Report) -> bool:
    """Runs what a control asks for; its failure becomes the status line, its success clears it.

    Returns:
        Whether the action succeeded.

    Example:
        >>> said = []
        >>> attempt(lambda: int("x"), said.append)
        False
        >>> said
        ["ValueError: invalid literal for int() with base 10: 'x'"]
    """
    try:
        action()
    except HetkitError as error:
        report(str(error))
        return False
    except Exception as error:
        _logger.exception("a dashboard control failed")
        report(f"{type(error).__name__}: {error}")
        return False
    report("")
    return True


def weakly(method: Callable[..., object], *first: object) -> Callable[..., None]:
    """Returns a callable that calls the bound ``method`` for as long as its object lives.

    Args:
        method: A bound method.
        *first: Arguments put before those of each call.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        target = reference()
        if target is not None:
            target(*first, *arguments)

    return call


class Mirror:
    """Tells a control's own mirroring of the session from the user's hand.

    ipywidgets calls the observers either way, on whichever thread sets the value. The lock is held
    while mirroring only, never while the session is called, so two threads cannot block each other.

    Example:
        >>> mirror = Mirror()
        >>> with mirror.showing():
        ...     mirror.by_hand
        False
        >>> mirror.by_hand
        True
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._showing = False

    @contextmanager
    def showing(self) -> Iterator[None]:
        """While inside, what this thread sets is the mirror's doing."""
        with self._lock:
            self._showing = True
            try:
                yield
            finally:
                self._showing = False

    @property
    def by_hand(self) -> bool:
        """Whether the change that is being observed came from outside."""
        with self._lock:
            return not self._showing
