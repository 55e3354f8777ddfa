"""Dashboard: the controls and the live strip of one session, as one widget."""

import contextlib
import time
import weakref
from typing import Any

import ipywidgets as ipw
from IPython import get_ipython
from IPython.display import display

from hetkit.widgets.batches import BatchControls
from hetkit.widgets.controls import Transport
from hetkit.widgets.entries import settings_controls
from hetkit.widgets.feed import Feed
from hetkit.widgets.panels import Review
from hetkit.widgets.preview import Preview
from hetkit.widgets.strip import Strip
from hetkit.widgets.wiring import SessionLike, weakly


class CellWatch:
    """Tells whether a notebook cell runs in this kernel, by IPython's own cell events.

    Example:
        >>> CellWatch(None).busy
        False
    """

    def __init__(self, shell: Any) -> None:
        # Made in a cell, it sees that cell's end but not its start.
        self.busy = shell is not None and getattr(shell, "kernel", None) is not None
        self.idle_since = time.monotonic()
        self._hooks = [
            ("pre_run_cell", weakly(self._begin)),
            ("post_run_cell", weakly(self._end)),
        ]
        self._shell = shell
        for name, hook in self._hooks if shell is not None else ():
            shell.events.register(name, hook)

    def close(self) -> None:
        """Takes its hooks out of IPython. Closing twice is fine."""
        for name, hook in self._hooks if self._shell is not None else ():
            with contextlib.suppress(ValueError):
                self._shell.events.unregister(name, hook)
        self._shell = None

    def _begin(self, *_: object) -> None:
        self.busy = True

    def _end(self, *_: object) -> None:
        self.busy = False
        self.idle_since = time.monotonic()


class Dashboard:
    """The controls and the live strip of one session.

    It lives as long as somebody holds it; `show` lets the session hold it. Closing the *session*
    leaves the last picture in the notebook; `close` takes it away.

    Args:
        session: What to show and to steer.
        period_s: Seconds between two updates while somebody looks. Default 0.5.

    Attributes:
        widget: The root `ipywidgets.VBox`, to display or to put into a layout of one's own.

    Example:
        >>> import torch, hetkit as hk
        >>> task = hk.Task(
        ...     model=lambda: torch.nn.Linear(3, 1),
        ...     data=torch.randn(64, 3),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ... )
        >>> with hk.Session(task, devices="cpu*2", global_batch=16) as session:
        ...     dashboard = Dashboard(session)
        ...     dashboard.batches.mode.value = "even"
        ...     session.settings.batches
        ...     dashboard.close()
        'even'
    """

    def __init__(self, session: SessionLike, *, period_s: float = 0.5) -> None:
        self._cells = CellWatch(get_ipython())
        self.feed = Feed(session, self._cells, on_tick=weakly(self._refresh), period_s=period_s)
        say = self.feed.say
        self.transport = Transport(session, say)
        self.batches = BatchControls(session, say)
        self.settings = settings_controls(session, say)
        self.preview = Preview(session, say)
        self.strip = Strip(self.feed.snapshot, self.feed.receive)
        self.review = Review(session, say)
        settings = ipw.HBox(
            [self.batches.widget, *(control.widget for control in self.settings.values())],
            layout={"flex_flow": "row wrap"},
        )
        self.widget = ipw.VBox(
            [
                self.transport.widget,
                settings,
                self.preview.widget,
                self.batches.manual,
                self.strip,
                self.review.widget,
            ],
            layout={"width": "100%"},
        )
        self._refresh()
        self._end = weakref.finalize(self, self._cells.close)
        self.feed.start(self.strip.send)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._end.alive

    def close(self) -> None:
        """Ends the updates and takes the widgets out of the notebook. Closing twice is fine."""
        self.feed.stop()
        self._end()
        self.review.close()
        _close_tree(self.widget)

    def _refresh(self) -> None:
        self.transport.refresh()
        self.batches.refresh()
        self.preview.refresh()
        for control in self.settings.values():
            control.refresh()

    def _ipython_display_(self) -> None:
        display(self.widget)  # type: ignore[no-untyped-call]


def show(session: SessionLike) -> Dashboard:
    """Displays the session's dashboard in the notebook; the second time, another view of it.

    This is the entry point ``hetkit.display``. The session keeps the dashboard, as its attribute
    ``dashboard``, so both live and are collected together.

    Args:
        session: What to show and to steer.

    Returns:
        The session's one dashboard.
    """
    dashboard = getattr(session, "dashboard", None)
    if not isinstance(dashboard, Dashboard) or dashboard.closed:
        dashboard = Dashboard(session)
        session.dashboard = dashboard
    display(dashboard.widget)  # type: ignore[no-untyped-call]
    return dashboard


def _close_tree(widget: Any) -> None:
    # A widget's layout and style are widgets of their own, which its close() leaves open.
    for child in getattr(widget, "children", ()):
        _close_tree(child)
    for part in (widget, widget.layout, getattr(widget, "style", None)):
        if part is not None:
            part.close()
