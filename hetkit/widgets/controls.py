"""Controls: run, pause, step, stop, and the settings that the dashboard can change.

Every callback only calls a session method, which queues the wish for the coordinator, and every
control mirrors the session: what a cell has set shows here too, and a refused value goes back.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Self

import ipywidgets as ipw

from hetkit.settings import AMP_MODES, Settings
from hetkit.widgets.frames import show_value
from hetkit.widgets.wiring import Mirror, Report, SessionLike, attempt, weakly

EPOCHS = 10
STARTABLE = ("new", "ready", "failed")
STOPPABLE = ("starting", "running", "paused", "recovering")


class Transport:
    """Run, pause or resume, step and stop.

    Args:
        session: What they act on.
        report: Takes messages for the status line.
    """

    def __init__(self, session: SessionLike, report: Report) -> None:
        self._session = session
        self._report = report
        self.epochs = ipw.BoundedIntText(
            value=EPOCHS,
            min=1,
            max=1_000_000,
            description="Epochs",
            style={"description_width": "52px"},
            layout={"width": "124px"},
        )
        self.run = _button("Run", "play", "Train this many epochs", "success")
        self.pause = _button("Pause", "pause", "Stop all devices after the granted steps")
        self.step = _button("Step", "step-forward", "Train one step, then stand still")
        self.stop = _button("Stop", "stop", "End the run", "danger")
        self.widget = ipw.HBox(
            [self.run, self.epochs, self.pause, self.step, self.stop],
            layout={"flex_flow": "row wrap"},
        )
        self.refresh()
        self.run.on_click(weakly(self._run))
        self.pause.on_click(weakly(self._pause))
        self.step.on_click(weakly(self._step))
        self.stop.on_click(weakly(self._stop))

    def refresh(self) -> None:
        """Enables what fits the session's state."""
        state = self._session.state
        self.run.disabled = state not in STARTABLE
        self.pause.disabled = state not in ("running", "paused")
        self.pause.description = "Resume" if state == "paused" else "Pause"
        self.pause.icon = "play" if state == "paused" else "pause"
        self.step.disabled = state not in (*STARTABLE, "paused")
        self.stop.disabled = state not in STOPPABLE

    def _run(self, _: object) -> None:
        attempt(lambda: self._session.run(epochs=self.epochs.value), self._report)

    def _pause(self, _: object) -> None:
        paused = self._session.state == "paused"
        attempt(self._session.resume if paused else self._session.pause, self._report)

    def _step(self, _: object) -> None:
        attempt(lambda: self._session.step(1), self._report)

    def _stop(self, _: object) -> None:
        attempt(self._session.stop, self._report)


class Choice:
    """One setting as a dropdown, with when it takes effect and what is in force.

    Args:
        session: Whose setting it is.
        name: The setting's field.
        label: Its text.
        choices: Returns its values for the present settings.
        report: Takes messages for the status line.
    """

    def __init__(
        self,
        session: SessionLike,
        name: str,
        label: str,
        choices: Callable[[Settings], Sequence[object]],
        report: Report,
    ) -> None:
        self._session = session
        self._name = name
        self._choices = choices
        self._report = report
        self._mirror = Mirror()
        self._values: dict[str, object] = {}
        field = Settings.__dataclass_fields__[name]
        self._effect = field.metadata["effect"]
        width = 7 * len(label) + 10
        self.dropdown = ipw.Dropdown(
            description=label,
            tooltip=f"{field.metadata['meaning']}; from the {self._effect}",
            style={"description_width": f"{width}px"},
            layout={"width": f"{width + 88}px"},
        )
        self.note = effect_note()
        self.widget = ipw.VBox([self.dropdown, self.note], layout={"margin": "0 8px 0 0"})
        self.refresh()
        self.dropdown.observe(weakly(self._choose), "value")

    @classmethod
    def of_amp(cls, session: SessionLike, report: Report) -> Self:
        """Returns the dropdown of the precision."""
        return cls(session, "amp", "AMP", lambda _: AMP_MODES, report)

    @classmethod
    def of_micro_batch(cls, session: SessionLike, report: Report) -> Self:
        """Returns the dropdown of the micro-batch: powers of two."""
        return cls(session, "micro_batch", "Micro-batch", _micro_batches, report)

    def refresh(self) -> None:
        """Brings the dropdown and its note to the session's settings, whoever changed them."""
        settings, applied = self._session.settings, self._session.applied
        value = getattr(settings, self._name)
        values = [*self._choices(settings), value]
        # By their texts: the dropdown itself takes None for "nothing chosen".
        self._values = {_option(v): v for v in values}
        with self._mirror.showing():
            if self.dropdown.options != tuple(self._values):
                self.dropdown.options = tuple(self._values)
            self.dropdown.value = _option(value)
        in_force = getattr(applied, self._name) if applied is not None else value
        self.note.value = effect_text(self._effect, value, in_force)

    def _choose(self, change: dict[str, Any]) -> None:
        wanted = self._values.get(change["new"])
        unchanged = wanted == getattr(self._session.settings, self._name)
        if unchanged or not self._mirror.by_hand:
            return
        attempt(lambda: self._session.set(**{self._name: wanted}), self._report)
        self.refresh()


def effect_note() -> Any:
    """Returns the small line under a control."""
    return ipw.HTML(layout={"margin": "-6px 0 0 4px"})


def effect_text(effect: str, requested: object, applied: object) -> str:
    """Returns that line: when a change takes effect and, until then, what is in force.

    Example:
        >>> import re
        >>> re.sub("<.*?>", "", effect_text("next epoch", "bf16", "off"))
        '● from next epoch; now off'
    """
    style = "font-size:11px;line-height:14px;white-space:nowrap;color:var(--jp-ui-font-color2,#777)"
    if requested == applied:
        return f'<span style="{style}">from {effect}</span>'
    now = escape(_option(applied))
    dot = '<b style="color:var(--jp-warn-color1,#e65100)">●</b>'
    return f'<span style="{style}">{dot} from {effect}; now {now}</span>'


def _option(value: object) -> str:
    return "as fits" if value is None else show_value(value)


def _micro_batches(settings: Settings) -> list[object]:
    powers = (2**k for k in range(settings.global_batch.bit_length()))
    return [None, *(p for p in powers if p <= settings.global_batch)]


def _button(text: str, icon: str, tooltip: str, style: str = "") -> Any:
    return ipw.Button(
        description=text, icon=icon, tooltip=tooltip, button_style=style, layout={"width": "88px"}
    )
