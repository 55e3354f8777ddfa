import gc
import logging
import threading
import weakref
from typing import Any

import pytest

from hetkit.errors import SessionError
from hetkit.widgets.wiring import Mirror, attempt, weakly


class Owner:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def call(self, *arguments: object) -> None:
        self.calls.append(arguments)


def test_a_success_clears_the_status_line(said: list[str]) -> None:
    assert attempt(lambda: None, said.append)
    assert said == [""]


def test_a_hetkit_error_is_shown_in_its_own_words(said: list[str]) -> None:
    def refuse() -> None:
        raise SessionError("the session is closed: make a new one.")

    assert not attempt(refuse, said.append)
    assert said == ["the session is closed: make a new one."]


def test_any_other_error_is_shown_with_its_type_and_logged(
    said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError("x")

    with caplog.at_level(logging.ERROR):
        assert not attempt(fail, said.append)
    assert said == ["KeyError: 'x'"]
    assert caplog.records[0].exc_info is not None


def test_a_weak_callback_calls_while_its_owner_lives_and_does_not_keep_it() -> None:
    owner = Owner()
    call, alive = weakly(owner.call, "first"), weakref.ref(owner)
    call("second")
    assert owner.calls == [("first", "second")]
    del owner
    gc.collect()
    assert alive() is None
    call("third")


def test_the_hand_of_another_thread_is_told_from_the_mirror() -> None:
    mirror, answers = Mirror(), []
    with mirror.showing():
        hand = threading.Thread(target=lambda: answers.append(mirror.by_hand))
        hand.start()
        answers.append(mirror.by_hand)
    hand.join(timeout=10)
    assert answers == [False, True]


def test_the_mirror_is_released_after_an_error() -> None:
    mirror: Any = Mirror()
    with pytest.raises(RuntimeError), mirror.showing():
        raise RuntimeError
    assert mirror.by_hand
