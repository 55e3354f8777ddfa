"""Panels: what is built when it is asked for, to look back: charts, the ledger, the output."""

from html import escape
from importlib import resources
from typing import Any

import anywidget
import ipywidgets as ipw

from hetkit.widgets.wiring import Report, SessionLike, attempt, weakly

OUTPUT_LINES = 40


class Plot(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """Shows plotly figures in the page, without `FigureWidget` and without a request to anywhere.

    plotly.js is sent once to each page that asks, as a message, so no notebook ever saves it.

    Example:
        >>> import plotly.graph_objects as go
        >>> plot = Plot()
        >>> plot.show([go.Figure(layout={"title": "loss"})])
        >>> plot.close()
    """

    def __init__(self) -> None:
        self._esm = (resources.files("hetkit.widgets") / "plot.js").read_text(encoding="utf-8")
        self._figures: list[str] = []
        super().__init__()
        self.on_msg(weakly(self._answer))

    def show(self, figures: list[Any]) -> None:
        """Shows these figures instead of the ones before."""
        self._figures = [figure.to_json() for figure in figures]
        self.send({"kind": "figures", "figures": self._figures})

    def _answer(self, _: Any, content: dict[str, Any], __: list[Any]) -> None:
        if content.get("kind") == "library":
            from plotly.offline import get_plotlyjs

            self.send({"kind": "library", "source": get_plotlyjs()})
        self.send({"kind": "figures", "figures": self._figures})


class Review:
    """Three buttons under the strip: charts, ledger, output. Each builds its panel anew.

    Args:
        session: What to look back on.
        report: Takes messages for the status line.
    """

    def __init__(self, session: SessionLike, report: Report) -> None:
        self._session = session
        self._report = report
        self.tabs = ipw.ToggleButtons(
            options=("Hide", "Charts", "Ledger", "Output"),
            style={"button_width": "72px"},
        )
        self.again = ipw.Button(description="Refresh", icon="refresh", layout={"width": "96px"})
        self.plot = Plot()
        self.page = ipw.HTML(layout={"overflow": "auto"})
        self.body = ipw.VBox()
        self.widget = ipw.VBox([ipw.HBox([self.tabs, self.again]), self.body])
        self.again.layout.visibility = "hidden"
        self.tabs.observe(weakly(self._choose), "value")
        self.again.on_click(weakly(self._choose))

    def close(self) -> None:
        """Puts both panels into the page, so that whoever closes the page closes them too."""
        self.body.children = (self.plot, self.page)

    def _choose(self, _: object) -> None:
        chosen = self.tabs.value
        self.again.layout.visibility = "hidden" if chosen == "Hide" else "visible"
        builders = {"Charts": self._charts, "Ledger": self._ledger, "Output": self._output}
        if chosen in builders:
            attempt(builders[chosen], self._report)
        else:
            self.body.children = ()

    def _charts(self) -> None:
        figures = [self._session.history.plot(), self._session.ledger.plot()]
        self.body.children = (self.plot,)
        self.plot.show(figures)

    def _ledger(self) -> None:
        self.page.value = self._session.ledger._repr_html_()
        self.body.children = (self.page,)

    def _output(self) -> None:
        parts = []
        for rank, device in enumerate(self._session.devices):
            tail = self._session.output.tail(rank, OUTPUT_LINES) or "–"
            title = escape(f"rank {rank}, {device.label}")
            parts.append(f"<b>{title}</b><pre>{escape(tail)}</pre>")
        self.page.value = "".join(parts)
        self.body.children = (self.page,)
