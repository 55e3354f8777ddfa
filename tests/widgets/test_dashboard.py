import gc
import threading
import time
import weakref
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
from IPython.core.events import EventManager, available_events
from ipywidgets.widgets import widget as registry
from widgets.fake_session import FakeSession

from hetkit.widgets import dashboard as module
from hetkit.widgets.dashboard import CellWatch, Dashboard, show

LIMIT_S = 20.0


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    shown: list[Any] = []
    monkeypatch.setattr(module, "display", shown.append)
    return shown


@pytest.fixture
def dashboard(session: FakeSession) -> Any:
    made = Dashboard(session, period_s=0.02)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_show_is_the_entry_point() -> None:
    (point,) = entry_points(group="hetkit.display")
    assert point.load() is show


def test_the_second_display_is_another_view_of_the_same(
    session: FakeSession, displayed: list[Any]
) -> None:
    first, second = show(session), show(session)
    assert first is second
    assert displayed == [first.widget, first.widget]
    first.close()


def test_a_closed_dashboard_is_made_anew(session: FakeSession, displayed: list[Any]) -> None:
    first = show(session)
    first.close()
    second = show(session)
    assert second is not first
    second.close()


def test_the_controls_follow_the_session(session: FakeSession, dashboard: Dashboard) -> None:
    session.set(amp="bf16", batches="auto")
    session.state = "paused"
    until(lambda: dashboard.settings["amp"].dropdown.value == "bf16")
    until(lambda: dashboard.transport.pause.description == "Resume")
    until(lambda: dashboard.batches.mode.value == "auto")
    assert [name for name, _ in session.calls] == ["set"]


def test_a_refusal_reaches_the_strip(session: FakeSession, dashboard: Dashboard) -> None:
    sent: list[dict[str, Any]] = []
    dashboard.feed._send = lambda content, buffers: sent.append(content)
    session.state = "recovering"
    dashboard.transport.run.click()
    assert "recovering" in sent[-1]["head"]["status"]


def test_the_state_holds_a_snapshot_that_is_built_only_when_asked(
    session: FakeSession, dashboard: Dashboard
) -> None:
    built = []
    snapshot = dashboard.feed.snapshot

    class Counting:
        def snapshot(self) -> dict[str, Any]:
            built.append(1)
            return snapshot()

    counting = Counting()
    dashboard.strip._build = weakref.WeakMethod(counting.snapshot)
    session.advance(12)
    assert built == []
    state = dashboard.strip.get_state()["snapshot"]
    assert built == [1]
    assert dict(state["layout"])["speed:0"] == 12
    assert isinstance(state["data"], bytes)


def test_closing_twice_leaves_no_widget_and_no_thread(session: FakeSession) -> None:
    before = set(registry._instances)
    made = Dashboard(session)
    made.review.tabs.value = "Ledger"
    made.close()
    made.close()
    assert made.closed
    left = [registry._instances[key] for key in set(registry._instances) - before]
    assert left == []
    until(lambda: not [t for t in threading.enumerate() if t.name == "hetkit-feed"])


def test_a_dropped_session_takes_its_dashboard_along(displayed: list[Any]) -> None:
    session = FakeSession(2)
    show(session)
    displayed.clear()
    alive = weakref.ref(session)
    del session

    def gone() -> bool:
        gc.collect()
        return alive() is None

    until(gone)


class Shell:
    """As much of IPython's shell as has to do with cells."""

    kernel = object()

    def __init__(self) -> None:
        self.events = EventManager(self, available_events, print_on_error=False)


def test_cells_are_watched_by_ipythons_own_events() -> None:
    shell = Shell()
    watch = CellWatch(shell)
    assert watch.busy  # it is made in a cell
    shell.events.trigger("post_run_cell", None)
    assert not watch.busy
    shell.events.trigger("pre_run_cell", None)
    assert watch.busy
    watch.close()
    watch.close()
    assert not any(shell.events.callbacks.values())
