import json
from typing import Any

import pytest

from hetkit.widgets.panels import Plot, Review


@pytest.fixture
def review(session: Any, said: list[str]) -> Review:
    session.advance(50)
    return Review(session, said.append)


@pytest.fixture
def sent(review: Review, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    monkeypatch.setattr(review.plot, "send", messages.append)
    return messages


def test_nothing_is_built_before_it_is_asked_for(review: Review) -> None:
    assert review.body.children == ()
    assert review.page.value == ""


def test_charts_are_sent_as_figures(review: Review, sent: list[dict[str, Any]]) -> None:
    review.tabs.value = "Charts"
    assert review.body.children == (review.plot,)
    assert [message["kind"] for message in sent] == ["figures"]
    titles = [json.loads(text)["layout"]["title"]["text"] for text in sent[0]["figures"]]
    assert len(titles) == 2
    assert all("emulated" in title for title in titles)


def test_the_library_is_sent_to_the_page_that_asks(
    review: Review, sent: list[dict[str, Any]]
) -> None:
    review.plot._handle_custom_msg({"kind": "library"}, [])
    assert [message["kind"] for message in sent] == ["library", "figures"]
    assert len(sent[0]["source"]) > 1_000_000


def test_no_library_is_in_the_state_that_a_notebook_saves(review: Review) -> None:
    review.tabs.value = "Charts"
    state = Plot().get_state()
    assert sum(len(str(value)) for value in state.values()) < 10_000


def test_the_ledger_and_a_refresh(session: Any, review: Review) -> None:
    review.tabs.value = "Ledger"
    before = review.page.value
    assert before.count("<tr") >= 2
    session.advance(40)
    review.again.click()
    assert len(review.page.value) > len(before)


def test_the_output_is_escaped_and_tells_the_ranks(session: Any, review: Review) -> None:
    session.output.lines[1] = "loss <nan>\nhello"
    review.tabs.value = "Output"
    assert "rank 1, V100 #1" in review.page.value
    assert "loss &lt;nan&gt;" in review.page.value


def test_what_cannot_be_drawn_is_said(
    session: Any, review: Review, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no figure")

    monkeypatch.setattr(session.history, "plot", fail)
    review.tabs.value = "Charts"
    assert said == ["RuntimeError: no figure"]


def test_hide_takes_it_away(review: Review) -> None:
    review.tabs.value = "Ledger"
    review.tabs.value = "Hide"
    assert review.body.children == ()
