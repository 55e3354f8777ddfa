"""The figures of a review: line panels over the steps, and the time split of each epoch.

Plotly is imported inside these functions only. Colours are the palette of Okabe and Ito (Color
Universal Design, 2008), readable by colour-blind people; text and grid are mid-grey on a clear
ground, so that the same figure reads in JupyterLab's light and dark themes.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8A800", "#56B4E9", "#E69F00", "#888888")
_GREY = "#808080"
_PART_COLOURS = {
    "data": "#8fb8de",
    "compute": "#3f7f4f",
    "wait": "#e0a030",
    "transfer": "#c2503f",
    "codec": "#e58f80",
    "optimizer": "#8f7fb5",
    "other": "#b5b5b5",
}
"""The parts of a step have the colours that the dashboard's strip gives them (strip.css)."""

_GRID = "rgba(128,128,128,0.25)"
_CLEAR = "rgba(0,0,0,0)"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: its name and its points, which are marked where ``points`` says so."""

    name: str
    x: NDArray[Any]
    y: NDArray[np.float64]
    points: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a figure: its title, the number format of its axis, and its curves."""

    title: str
    lines: Sequence[Line]
    tick_format: str = ""


def draw_panels(
    panels: Sequence[Panel], *, title: str, marks: Sequence[tuple[int, str]] = ()
) -> "Figure":
    """Draws panels one above the other over a common axis of steps.

    Args:
        panels: From top to bottom.
        title: Of the whole figure; it says where the figures are emulated.
        marks: ``(step, text)`` of what happened: a dotted line through all panels, with the text
            under the pointer.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.08,
        subplot_titles=[panel.title for panel in panels],
    )
    for row, panel in enumerate(panels, start=1):
        for index, line in enumerate(panel.lines):
            style = {"color": _PALETTE[index % len(_PALETTE)], "width": 1.5}
            name = html.escape(line.name)
            mode = "lines+markers" if line.points else "lines"
            curve = Scatter(x=line.x, y=line.y, name=name, mode=mode, line=style)
            curve.update(legendgroup=name, showlegend=len(panel.lines) > 1)
            figure.add_trace(curve, row=row, col=1)
        figure.update_yaxes(rangemode="tozero", tickformat=panel.tick_format, row=row, col=1)
    _add_marks(figure, marks)
    figure.update_xaxes(title_text="step", row=len(panels), col=1)
    return _themed(figure, title, height=190 * len(panels) + 110)


def draw_epochs(
    *,
    title: str,
    epochs: Sequence[int],
    samples_per_s: Sequence[float],
    notes: Sequence[str],
    bars: tuple[Sequence[str], Sequence[str]],
    parts: Mapping[str, Sequence[float]],
) -> "Figure":
    """Draws the throughput of each epoch above the time split of each rank.

    Args:
        title: Of the whole figure; it says where the figures are emulated.
        epochs: Numbers of the epochs.
        samples_per_s: Throughput of each epoch.
        notes: What ran in each epoch, shown under the pointer.
        bars: Epoch and device of each bar, outer and inner label.
        parts: Seconds of each bar by the part's name; stacked, they make the step.
    """
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.16,
        subplot_titles=["throughput by epoch [samples/s]", "median step by part [s]"],
    )
    throughput = Scatter(
        x=list(epochs),
        y=list(samples_per_s),
        text=[html.escape(note) for note in notes],
        mode="lines+markers",
        showlegend=False,
        line={"color": _PALETTE[0]},
    )
    figure.add_trace(throughput, row=1, col=1)
    labels = [[html.escape(label) for label in level] for level in bars]
    for name, seconds in parts.items():
        colour = {"color": _PART_COLOURS[name]}
        bar = Bar(x=labels, y=list(seconds), name=name, marker=colour)
        figure.add_trace(bar, row=2, col=1)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(dtick=_whole_ticks(len(epochs)), row=1, col=1)
    figure.update_yaxes(rangemode="tozero")
    return _themed(figure, title, height=560)


def _add_marks(figure: "Figure", marks: Sequence[tuple[int, str]]) -> None:
    from plotly.graph_objects import Scatter

    if not marks:
        return
    # One list of shapes at once: add_vline() copies all earlier ones with every call.
    line = {"color": _GREY, "width": 1, "dash": "dot"}
    ends = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": line}
    figure.update_layout(shapes=[{**ends, "x0": step, "x1": step} for step, _ in marks])
    flags = Scatter(
        x=[step for step, _ in marks],
        y=[0] * len(marks),
        text=[html.escape(text) for _, text in marks],
        name="events",
        mode="markers",
        marker={"symbol": "triangle-up", "color": _GREY, "size": 8},
        hovertemplate="step %{x}: %{text}<extra></extra>",
    )
    figure.add_trace(flags, row=1, col=1)


def _whole_ticks(count: int) -> int:
    return max(1, count // 10)


def _themed(figure: "Figure", title: str, *, height: int) -> "Figure":
    figure.update_layout(
        title={"text": html.escape(title), "font": {"size": 15}},
        template="none",
        height=height,
        margin={"l": 70, "r": 20, "t": 80, "b": 50},
        font={"color": _GREY},
        paper_bgcolor=_CLEAR,
        plot_bgcolor=_CLEAR,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.06, "xanchor": "right", "x": 1.0},
    )
    figure.update_annotations(font={"size": 12, "color": _GREY})
    figure.update_xaxes(gridcolor=_GRID, zeroline=False)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False)
    return figure
