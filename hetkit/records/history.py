"""What happened, step by step and rank by rank: in memory, bounded, safe to read while it grows.

The coordinator writes; widgets and the user read, from any thread.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from hetkit.records.charts import Line, Panel, draw_panels
from hetkit.records.columns import Floats
from hetkit.records.report import data_frame
from hetkit.records.step_columns import StepColumns
from hetkit.records.steps import Event, RankStep, StepRecord

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

__all__ = ["MOST_EVENTS", "RECENT_STEPS", "Event", "History", "RankStep", "StepRecord"]

RECENT_STEPS = 200
"""How many of the newest steps are kept as whole records."""

MOST_EVENTS = 1000
"""How many of the newest events are kept."""

_MARKED = ("settings", "plan", "skip", "failure", "recovery")


class History:
    """The session's steps and events.

    At most ``capacity`` points are kept: the newest half is exact, step by step; older steps are
    averaged into equal groups that grow with the run (`hetkit.records.columns`), each standing at
    its last step. So a run of 24 hours costs no more than one of a few minutes. Of a speed, such
    a point shows the samples of its steps over their time; of a memory peak, the largest.

    Steps only go up: when a step is done again after a recovery, the undone ones from there on
    are dropped, as the training itself has dropped them. The event of the recovery stays.

    Args:
        labels: A label per rank.
        emulated: Per rank, whether its device is emulated.
        capacity: Most points kept, at least 4. Default 2,000.

    Raises:
        ValueError: The labels and the flags differ in number, there are none, or ``capacity`` is
            below 4.

    Example:
        >>> history = History(labels=["A100 #0"], emulated=[True])
        >>> rank = RankStep(step=0, epoch=0, rank=0, time_s=0.25, batch=32, step_s=0.25,
        ...                 data_s=0.01, compute_s=0.16, wait_s=0.0, transfer_s=0.05, codec_s=0.0,
        ...                 optimizer_s=0.02, other_s=0.01, overlapped_s=0.1, wire_bytes=1024.0)
        >>> history.append(StepRecord(step=0, epoch=0, time_s=0.25, samples=32, loss=2.3,
        ...                           skipped=False, ranks=(rank,)))
        >>> history
        History(1 device, emulated; 1 step in 1 point; 0 events)
        >>> steps, speeds = history.series("samples_per_s", rank=0)
        >>> speeds.tolist()
        [128.0]
    """

    def __init__(
        self, labels: Sequence[str], emulated: Sequence[bool], capacity: int = 2000
    ) -> None:
        if not labels or len(labels) != len(emulated):
            raise ValueError(
                f"labels and emulated must have one value per rank, at least one: "
                f"got {len(labels)} and {len(emulated)}."
            )
        self.labels = tuple(labels)
        self.emulated = tuple(emulated)
        self._columns = StepColumns(labels=labels, emulated=emulated, capacity=capacity)
        self._recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._events: deque[tuple[int, Event]] = deque(maxlen=MOST_EVENTS)
        self._version = 0
        self._lock = threading.RLock()

    def append(self, record: StepRecord) -> None:
        """Adds a step; one that was done before takes the place of it and of all after it.

        Raises:
            ValueError: The step has a rank that the session has not; nothing was changed.
        """
        with self._lock:
            self._columns.append(record)
            while self._recent and self._recent[-1].step >= record.step:
                self._recent.pop()
            self._recent.append(record)
            self._version += 1

    def add_event(self, event: Event) -> None:
        """Adds an event; of more than 1,000 the oldest goes."""
        with self._lock:
            self._version += 1
            self._events.append((self._version, event))

    @contextmanager
    def held(self) -> Iterator["History"]:
        """Keeps writers out for the length of a ``with`` block, so that several reads agree."""
        with self._lock:
            yield self

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.labels)

    @property
    def version(self) -> int:
        """Grows by one with each step and each event."""
        with self._lock:
            return self._version

    @property
    def latest(self) -> StepRecord | None:
        """The newest step, or None before the first."""
        with self._lock:
            return self._recent[-1] if self._recent else None

    @property
    def events(self) -> tuple[Event, ...]:
        """The newest 1,000 events, oldest first."""
        return self.events_since(0)

    def events_since(self, version: int) -> tuple[Event, ...]:
        """Returns the events that came after the history was at ``version``, oldest first."""
        with self._lock:
            return tuple(event for at, event in self._events if at > version)

    def records_since(self, step: int) -> list[StepRecord]:
        """Returns the whole records after ``step``, oldest first: at most the newest 200."""
        with self._lock:
            return [record for record in self._recent if record.step > step]

    def series(self, name: str, rank: int | None = None) -> tuple[Floats, Floats]:
        """Returns one curve.

        Args:
            name: Without a rank: ``"samples_per_s"``, ``"step_s"``, ``"loss"``, ``"comm_share"``,
                ``"compute_spread"``, ``"samples"``, ``"skipped"`` (the share of skipped steps),
                ``"loss_scale"`` (with fp16), ``"lr"`` (of the first parameter group),
                ``"wire_bytes"`` (of the rank that sent most), ``"guard_cosine"`` and
                ``"guard_error"`` (where the guard looked), ``"epoch"``, ``"time_s"``.
                With a rank: a field or property of `RankStep`.
            rank: The rank, or None (default) for the step of all ranks.

        Returns:
            The steps and the values, shape ``(points,)`` each; copies. NaN where there is no
            reading.

        Raises:
            ValueError: There is no such series, or no such rank.
        """
        with self._lock:
            return self._columns.curve("step", None), self._columns.curve(name, rank)

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns all points in long form: one row per point and rank that took part.

        ``steps`` tells how many steps a point stands for; the columns named ``all_…`` are those
        of the step of all ranks. Seconds and bytes, as in `RankStep`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        with self._lock:
            return data_frame(self._columns.frame())

    def plot(self) -> "Figure":
        """Returns a plotly figure over the steps: speed of each rank, communication share, loss.

        Below them come what has readings: each device's peak of memory, the cosine of the
        compressed gradient to the true one, the fp16 loss scale. Events are marked in all panels.
        """
        with self._lock:
            panels = [
                Panel(title="speed [samples/s]", lines=self._rank_lines("samples_per_s")),
                Panel(
                    title="communication share, slowest rank",
                    lines=[self._line("communication share", "comm_share")],
                    tick_format=".0%",
                ),
                Panel(title="loss", lines=[self._line("loss", "loss")]),
                *self._found_panels(),
            ]
            marks = [(e.step, f"{e.kind}: {e.text}") for e in self.events if e.kind in _MARKED]
        title = "history" + (" (emulated)" if any(self.emulated) else "")
        return draw_panels(panels, title=title, marks=marks)

    def __len__(self) -> int:
        """Returns the number of points kept."""
        with self._lock:
            return len(self._columns)

    def __repr__(self) -> str:
        with self._lock:
            steps, points = int(self._columns.counts.sum()), len(self._columns)
            events = len(self._events)
        devices = _counted(self.world_size, "device") + (", emulated" if any(self.emulated) else "")
        return (
            f"History({devices}; {_counted(steps, 'step')} in {_counted(points, 'point')}; "
            f"{_counted(events, 'event')})"
        )

    def _found_panels(self) -> list[Panel]:
        peaks = self._rank_lines("memory_peak_bytes")
        cosine = self._line("cosine", "guard_cosine")
        # The guard looks at few steps: without the others the points join into a curve.
        looked = ~np.isnan(cosine.y)
        cosine = Line(name=cosine.name, x=cosine.x[looked], y=cosine.y[looked], points=True)
        panels = [
            Panel(title="largest memory use [bytes]", lines=peaks, tick_format=".3s"),
            Panel(title="cosine of the compressed gradient to the true one", lines=[cosine]),
            Panel(title="fp16 loss scale", lines=[self._line("loss scale", "loss_scale")]),
        ]
        return [panel for panel in panels if any(np.isfinite(line.y).any() for line in panel.lines)]

    def _rank_lines(self, series: str) -> list[Line]:
        named = zip(self.labels, self.emulated, strict=True)
        return [
            self._line(label + (" (emulated)" if emulated else ""), series, rank)
            for rank, (label, emulated) in enumerate(named)
        ]

    def _line(self, name: str, series: str, rank: int | None = None) -> Line:
        steps, values = self.series(series, rank)
        return Line(name=name, x=steps, y=values)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
