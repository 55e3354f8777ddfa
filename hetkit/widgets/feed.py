"""Feed: the one thread that carries a session's news to the strip in the browser.

::

    every 0.5 s    tick ─▶ [lock: number it, send it] ─▶ strip        only what is new
    page reload    get_state ─▶ snapshot (built only then) ─▶ strip   everything so far, thinned
    every few s    strip ─▶ ack ─▶ heard                              somebody is looking

Jupyter has no back-pressure: with the tab closed the server keeps every message. So when nobody has
acknowledged for `PATIENCE_S`, the feed falls to one message in `ALONE_S` (EVIDENCE.md §5). While a
cell runs, acknowledgements may not come through, and that time is not counted.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Protocol

from hetkit.records.history import Event, History
from hetkit.widgets.frames import (
    POINTS,
    describe_error,
    event_entry,
    fleet,
    head,
    new_points,
    pack,
    window,
)
from hetkit.widgets.wiring import SessionLike

_logger = logging.getLogger(__name__)

PERIOD_S = 0.5
ALONE_S = 5.0
PATIENCE_S = 10.0
HEARTBEAT_S = 2.0
"""While the session is at work, a message is due this often even without news: the strip warns
when none has come for five seconds."""

DELTA_POINTS = 64
AT_WORK = ("starting", "running", "recovering")

Send = Callable[..., None]


class CellClock(Protocol):
    """Tells whether a notebook cell runs in this kernel."""

    @property
    def busy(self) -> bool:
        """Whether a cell runs at this moment."""

    @property
    def idle_since(self) -> float:
        """When the last cell ended, on the monotonic clock."""


class Feed:
    """Carries a session's news to one strip, from a daemon thread of its own.

    The thread ends when the session is closed, on `stop`, and when the feed is collected.

    Args:
        session: What to show.
        cells: Tells when a cell runs.
        on_tick: Called before each message, to bring the controls up to date.
        period_s: Seconds between two messages while somebody looks. Default 0.5.
        clock: Returns seconds; the monotonic clock by default.
    """

    def __init__(
        self,
        session: SessionLike,
        cells: CellClock,
        *,
        on_tick: Callable[[], None] = lambda: None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._cells = cells
        self._on_tick = on_tick
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._send: Send | None = None
        self._number = 0
        self._step = -1
        self._last_event: Event | None = None
        self._head: dict[str, Any] = {}
        self._status = ""
        self._sent_at = float("-inf")
        self._unheard_since: float | None = None

    def start(self, send: Send) -> None:
        """Starts the thread; ``send(content, buffers=[…])`` takes each message."""
        self._send = send
        arguments = (weakref.ref(self), self._stop, self._period_s)
        threading.Thread(target=_beat, args=arguments, name="hetkit-feed", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after its present tick. Stopping twice is fine."""
        self._stop.set()

    def say(self, status: str) -> None:
        """Shows a message in the status line at once; the empty text clears it."""
        with self._lock:
            self._status = status
        self.push()

    def receive(self, content: dict[str, Any]) -> None:
        """Takes the strip's word: it has seen a message, or (``resync``) has missed one."""
        with self._lock:
            self._unheard_since = None
            if content.get("kind") == "resync":
                self._post(self._frame(whole=True)[0], self._clock())

    def snapshot(self) -> dict[str, Any]:
        """Returns everything so far; ipywidgets asks for it when a page (re)attaches."""
        with self._lock:
            self._unheard_since = None
            return self._frame(whole=True)[0]

    def watched(self, now: float) -> bool:
        """Whether somebody seems to look at the strip. Time in a running cell is not counted."""
        if self._unheard_since is None or self._cells.busy:
            return True
        return now - max(self._unheard_since, self._cells.idle_since) < PATIENCE_S

    def push(self) -> None:
        """Sends what is new at once, for a control that was just used."""
        self._update(at_once=True)

    def tick(self) -> bool:
        """Sends what is new if a message is due.

        Returns:
            Whether there may be more to send later.
        """
        closed = self._session.state == "closed"
        self._update(at_once=closed)
        return not closed

    def _update(self, *, at_once: bool) -> None:
        try:
            self._on_tick()
            with self._lock:
                self._advance(self._clock(), at_once=at_once)
        except Exception as error:
            # The thread outlives a bad tick: the next may work, and until then the reason is shown.
            fault = f"The dashboard could not be brought up to date: {describe_error(error)}"
            if fault != self._status:
                _logger.exception("the dashboard could not be brought up to date")
            self._status = fault

    def _advance(self, now: float, *, at_once: bool) -> None:
        since = now - self._sent_at
        if not at_once and not self.watched(now) and since < ALONE_S:
            return
        frame, step = self._frame(whole=False)
        news = frame["layout"] or frame["events"] or frame["head"] != self._head
        due = self._session.state in AT_WORK and since >= HEARTBEAT_S
        if news or due:
            self._post(frame, now)
            self._head = frame["head"]
            self._step = step

    def _frame(self, *, whole: bool) -> tuple[dict[str, Any], int]:
        """Returns a frame and the newest step in it; all that is known, or only what is new."""
        # The session is asked outside the history's lock: the coordinator may hold the session's
        # while it writes to the history.
        with self._session.history.held() as history:
            step = history.latest.step if history.latest is not None else -1
            events = history.events if whole else self._new_events(history)
            # After a recovery undone steps have left the history: the strip starts anew as well.
            if step < self._step or any(e.kind == "recovery" for e in events):
                whole, events = True, history.events
            points = new_points(
                history,
                after=-1 if whole else self._step,
                limit=POINTS if whole else DELTA_POINTS,
            )
            recent = history.records_since(-1)
        base, layout, data = pack(points)
        frame: dict[str, Any] = {
            "kind": "snapshot" if whole else "delta",
            "number": self._number,
            "head": head(self._session, window(recent, self._session.plan))
            | {"status": self._status},
            "events": [event_entry(event) for event in events],
            "base": base,
            "layout": layout,
            "data": data,
        }
        if whole:
            frame["fleet"] = fleet(self._session)
        return frame, step

    def _post(self, frame: dict[str, Any], now: float) -> None:
        # Numbered and sent under one lock: messages leave in the order of their numbers, and a
        # snapshot's number says exactly which of them it contains.
        if self._send is None:
            return
        self._number += 1
        content = frame | {"number": self._number}
        data = content.pop("data")
        self._send(content, buffers=[data])
        self._sent_at = now
        if self._unheard_since is None:
            self._unheard_since = now

    def _new_events(self, history: History) -> tuple[Event, ...]:
        events = history.events
        # From the newest back: there are seldom more than a few new ones.
        fresh = tuple(takewhile(lambda e: e is not self._last_event, reversed(events)))
        self._last_event = events[-1] if events else None
        return fresh[::-1]


def _beat(reference: "weakref.ref[Feed]", stop: threading.Event, period_s: float) -> None:
    while not stop.wait(period_s):
        feed = reference()
        if feed is None or not feed.tick():
            return
        del feed
