import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from widgets.fake_session import FakeSession

from hetkit.widgets.preview import Preview

LIMIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def preview(session: FakeSession, said: list[str]) -> Preview:
    session.advance(5)
    return Preview(session, said.append)


def ask(preview: Preview) -> None:
    preview.refresh()
    preview.button.click()
    until(lambda: not preview.button.disabled)


def test_it_is_there_while_a_change_waits(session: FakeSession, preview: Preview) -> None:
    assert preview.widget.layout.display == "none"
    session.set(compression="int8")
    preview.refresh()
    assert preview.widget.layout.display == "flex"
    session.advance(40)
    preview.refresh()
    assert preview.widget.layout.display == "none"


def test_before_the_start_nothing_is_predicted(said: list[str]) -> None:
    session = FakeSession(2)
    session.set(compression="int8")
    assert Preview(session, said.append).widget.layout.display == "none"


def test_it_asks_for_what_is_requested(session: FakeSession, preview: Preview) -> None:
    session.set(compression="int8", global_batch=128)
    ask(preview)
    assert session.calls[-1] == ("what_if", {"compression": "int8", "global_batch": 128})
    line = "Predicted, emulated: a step of 80.0 ms (75.0 … 85.0); 100.0 ms now. 1.25 ×"
    assert line in preview.page.value
    assert "<table" in preview.page.value


def test_other_changes_drop_what_was_predicted(session: FakeSession, preview: Preview) -> None:
    session.set(compression="int8")
    ask(preview)
    preview.refresh()
    assert preview.page.value
    session.set(compression="int4")
    preview.refresh()
    assert preview.page.value == ""


def test_what_cannot_be_predicted_is_said(
    session: FakeSession, preview: Preview, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "plan", None)
    session.set(compression="int8")
    ask(preview)
    assert said == ["too few steps have been measured."]
    assert preview.page.value == ""


def test_the_kernel_stays_free(
    session: FakeSession, preview: Preview, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, answer = threading.Event(), session.what_if
    asked: list[Any] = []

    def slow(**changes: Any) -> Any:
        asked.append(changes)
        go.wait(LIMIT_S)
        return answer(**changes)

    monkeypatch.setattr(session, "what_if", slow)
    session.set(compression="int8")
    preview.button.click()
    preview.button.click()
    assert preview.button.disabled
    go.set()
    until(lambda: not preview.button.disabled)
    assert asked == [{"compression": "int8"}]
