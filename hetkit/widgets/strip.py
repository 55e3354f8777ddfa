"""Strip: the live picture in the browser, one anywidget with its own small ES module."""

import weakref
from collections.abc import Callable
from importlib import resources
from typing import Any

import anywidget
import traitlets

SCRIPTS = ("charts.js", "strip.js")
STYLES = "strip.css"


def _text(*names: str) -> str:
    here = resources.files("hetkit.widgets")
    return "\n".join((here / name).read_text(encoding="utf-8") for name in names)


def _snapshot_to_json(_: Any, strip: "Strip") -> dict[str, Any] | None:
    return strip.build_snapshot()


class Strip(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """State, device cards, time split and charts of one session, drawn in the browser.

    The module's text is given as text, never as a path: anywidget would watch the file and so keep
    the widget alive for good (anywidget#929).

    Args:
        snapshot: Builds everything the strip shows. Called only when a page asks for the widget's
            state: at its first display, at a reload, in a second tab.
        receive: Takes the strip's messages.

    Both are bound methods and held weakly: ipywidgets keeps a widget until it is closed.

    Example:
        >>> class Source:
        ...     def snapshot(self):
        ...         return {"kind": "snapshot", "number": 7}
        ...     def receive(self, content):
        ...         print("seen")
        >>> source = Source()
        >>> strip = Strip(source.snapshot, source.receive)
        >>> strip.get_state()["snapshot"]["number"]
        7
        >>> strip.close()
    """

    snapshot = traitlets.Int(0).tag(sync=True, to_json=_snapshot_to_json)
    """Its value means nothing; reading the state serialises the snapshot in its place."""

    def __init__(
        self,
        snapshot: Callable[[], dict[str, Any]],
        receive: Callable[[dict[str, Any]], None],
    ) -> None:
        self._build = weakref.WeakMethod(snapshot)
        self._receive = weakref.WeakMethod(receive)
        self._esm = _text(*SCRIPTS)
        self._css = _text(STYLES)
        super().__init__()
        self.on_msg(self._take)

    def build_snapshot(self) -> dict[str, Any] | None:
        """Returns the snapshot, or None once the feed that builds it is gone."""
        build = self._build()
        return build() if build is not None else None

    def _take(self, _: Any, content: dict[str, Any], __: list[Any]) -> None:
        receive = self._receive()
        if receive is not None:
            receive(content)
