from typing import Any

import pytest

from hetkit.settings import AMP_MODES
from hetkit.widgets.controls import Choice, Transport, effect_text


@pytest.fixture
def transport(session: Any, said: list[str]) -> Transport:
    return Transport(session, said.append)


@pytest.fixture
def choices(session: Any, said: list[str]) -> dict[str, Choice]:
    return {
        "amp": Choice.of_amp(session, said.append),
        "micro_batch": Choice.of_micro_batch(session, said.append),
    }


def test_run_trains_as_many_epochs_as_the_box_says(session: Any, transport: Transport) -> None:
    transport.epochs.value = 3
    transport.run.click()
    assert session.calls == [("run", 3)]


def test_a_refused_run_is_said_and_raises_nothing(
    session: Any, transport: Transport, said: list[str]
) -> None:
    session.state = "closed"
    transport.run.click()
    assert said == ["the session is closed: run() needs one that is ready."]


def test_pause_goes_by_the_session_not_by_the_button(session: Any, transport: Transport) -> None:
    session.state = "running"
    transport.pause.click()
    transport.pause.click()
    assert session.calls == [("pause", None), ("resume", None)]


def test_step_and_stop(session: Any, transport: Transport) -> None:
    transport.step.click()
    transport.stop.click()
    assert session.calls == [("step", 1), ("stop", None)]


@pytest.mark.parametrize(
    ("state", "enabled"),
    [
        ("new", {"run", "step"}),
        ("ready", {"run", "step"}),
        ("failed", {"run", "step"}),
        ("running", {"pause", "stop"}),
        ("paused", {"pause", "step", "stop"}),
        ("closed", set()),
    ],
)
def test_buttons_are_enabled_by_the_state(
    session: Any, transport: Transport, state: str, enabled: set[str]
) -> None:
    session.state = state
    transport.refresh()
    names = ("run", "pause", "step", "stop")
    assert {name for name in names if not getattr(transport, name).disabled} == enabled
    assert transport.pause.description == ("Resume" if state == "paused" else "Pause")
    assert all(getattr(transport, name).description for name in names)


def test_the_choices_are_those_of_the_settings(choices: dict[str, Choice]) -> None:
    assert choices["amp"].dropdown.options == AMP_MODES
    assert choices["micro_batch"].dropdown.options[:4] == ("as fits", "1", "2", "4")
    assert choices["micro_batch"].dropdown.options[-1] == "256"


def test_choosing_asks_the_session_once(session: Any, choices: dict[str, Choice]) -> None:
    choices["amp"].dropdown.value = "bf16"
    choices["micro_batch"].dropdown.value = "32"
    choices["micro_batch"].dropdown.value = "as fits"
    assert session.calls == [
        ("set", {"amp": "bf16"}),
        ("set", {"micro_batch": 32}),
        ("set", {"micro_batch": None}),
    ]


def test_what_a_cell_sets_is_shown_and_asks_nothing(
    session: Any, choices: dict[str, Choice]
) -> None:
    session.settings = session.settings.change(
        amp=["bf16", "fp16", "off"], micro_batch=48, global_batch=512
    )
    for choice in choices.values():
        choice.refresh()
    assert choices["amp"].dropdown.value == "bf16 : fp16 : off"
    assert choices["micro_batch"].dropdown.value == "48"
    assert "512" in choices["micro_batch"].dropdown.options
    session.settings = session.settings.change(amp="off", micro_batch=None)
    for choice in choices.values():
        choice.refresh()
    assert choices["amp"].dropdown.options == AMP_MODES
    assert session.calls == []


def test_a_refused_choice_goes_back(
    session: Any, choices: dict[str, Choice], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("no bf16 here")

    monkeypatch.setattr(session, "set", refuse)
    choices["amp"].dropdown.value = "bf16"
    assert choices["amp"].dropdown.value == "off"
    assert said == ["ValueError: no bf16 here"]


def test_each_choice_says_when_it_takes_effect_and_what_is_in_force(
    session: Any, choices: dict[str, Choice]
) -> None:
    assert "from next epoch" in choices["amp"].note.value
    assert "from next grant" in choices["micro_batch"].note.value
    session.advance()
    choices["amp"].dropdown.value = "bf16"
    assert "now off" in choices["amp"].note.value


def test_the_note_is_escaped() -> None:
    assert "<script>" not in effect_text("next epoch", "a", "<script>")
