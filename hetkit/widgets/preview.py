"""Preview: what the requested settings are predicted to do, before they are in force.

A codec that was never in force is tried on the workers first, where they stand next; so nothing is
predicted before the button is pressed, and then on a thread of its own: the kernel stays free.
"""

import threading
from dataclasses import fields
from html import escape

import ipywidgets as ipw

from hetkit.planning.comparison import WhatIf
from hetkit.settings import Settings
from hetkit.widgets.wiring import Report, SessionLike, attempt, weakly

_TOOLTIP = (
    "Predict a step with the requested settings, before they are in force. The first time that a "
    "codec is asked about, it is tried on the workers, for about ten exchanges."
)


class Preview:
    """A button that is there while a change waits for the next epoch, and its prediction.

    Args:
        session: Whose settings are previewed.
        report: Takes messages for the status line.

    Attributes:
        button: Asks for the prediction.
        page: The prediction; empty again once other changes are asked for.
        widget: Both, to put into a layout.
    """

    def __init__(self, session: SessionLike, report: Report) -> None:
        self._session = session
        self._report = report
        self._asking = False
        self._shown: dict[str, object] = {}
        self.button = ipw.Button(
            description="What if?", icon="search", tooltip=_TOOLTIP, layout={"width": "104px"}
        )
        self.page = ipw.HTML(layout={"overflow": "auto", "margin": "0 0 0 8px"})
        self.widget = ipw.HBox([self.button, self.page], layout={"display": "none"})
        self.refresh()
        self.button.on_click(weakly(self._ask))

    def refresh(self) -> None:
        """Shows the button while something is requested, and drops a prediction of other things."""
        pending = pending_changes(self._session.settings, self._session.applied)
        if pending != self._shown and not self._asking:
            self.page.value = ""
            self._shown = {}
        self.button.disabled = self._asking
        self.widget.layout.display = "flex" if pending else "none"

    def _ask(self, _: object) -> None:
        if self._asking:
            return
        self._asking = True
        self.refresh()
        threading.Thread(target=self._predict, name="hetkit-preview", daemon=True).start()

    def _predict(self) -> None:
        pending = pending_changes(self._session.settings, self._session.applied)
        try:
            attempt(lambda: self._show(pending), self._report)
        finally:
            self._asking = False
            self.refresh()

    def _show(self, pending: dict[str, object]) -> None:
        self.page.value = preview_html(self._session.what_if(**pending))
        self._shown = pending


def pending_changes(settings: Settings, applied: Settings | None) -> dict[str, object]:
    """Returns all that is requested and not in force, where some of it waits for an epoch's end.

    What takes effect at the next grant is in force before one has read a prediction of it.

    Example:
        >>> pending_changes(Settings(amp="bf16", batches="even"), Settings())
        {'batches': 'even', 'amp': 'bf16'}
        >>> pending_changes(Settings(batches="even"), Settings())
        {}
    """
    if applied is None:
        return {}
    differ = [f for f in fields(Settings) if getattr(settings, f.name) != getattr(applied, f.name)]
    if all(each.metadata["effect"] == "next grant" for each in differ):
        return {}
    return {each.name: getattr(settings, each.name) for each in differ}


def preview_html(what_if: WhatIf) -> str:
    """Returns the prediction as one line, with its table behind it."""
    new = what_if.prediction
    kind = "Predicted, emulated" if what_if.emulated else "Predicted"
    line = (
        f"{kind}: a step of {new.step_s * 1e3:,.1f} ms "
        f"({new.low_s * 1e3:,.1f} … {new.high_s * 1e3:,.1f}); {what_if.now.step_s * 1e3:,.1f} ms "
        f"now. {new.samples_per_s / what_if.samples_per_s:.2f} × the samples/s"
    )
    table = what_if._repr_html_()
    return f"<details><summary>{escape(line)}</summary>{table}</details>"
