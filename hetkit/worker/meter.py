"""The meter: one rank's account of each step, sent at most ten times a second.

A GPU works behind the host's back, so there its own clock counts: an event at each pass's begin
and end, in the order of its stream, read when the step is over::

    host    ▌launch▐ data ▌launch▐ hands over │ waits for the peers         │ reads the events
    device    ██ pass 0 ██   ██ pass 1 ██ ◀ last bucket       ██ optimizer ██
              ▲         ▲    ▲         ▲ cut

Compute is the sum over the passes; the cut is where the last of them ends, counted from the step's
start, at which the device has nothing left to do (the loss of the step before was read).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hetkit.launch.messages import StepRow
from hetkit.planning.time_split import Stamps

SEND_EVERY_S = 0.1


class Event(Protocol):
    """A moment on a device's own clock, as `torch.cuda.Event` marks it."""

    def record(self) -> None:
        """Marks when the device comes to here."""

    def synchronize(self) -> None:
        """Waits until it has."""

    def elapsed_time(self, later: Any, /) -> float:
        """Returns the milliseconds from this one to a later one."""


def device_event(device: torch.device) -> Callable[[], Event] | None:
    """Returns what makes events on the device's clock; None where the host's clock is right."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Meter:
    """Stamps the parts of a step and collects the rows.

    Args:
        send: Called with the new rows when it is time, or when `flush` is.
        event: Makes an event on the device's clock; None: the host's clock counts.

    Example:
        >>> meter = Meter(print)
        >>> meter.begin_step()
        >>> with meter.data():
        ...     pass
        >>> stamps = meter.end_step()
        >>> stamps.start <= stamps.start + stamps.data_s <= stamps.end
        True
    """

    def __init__(
        self,
        send: Callable[[list[StepRow]], None],
        event: Callable[[], Event] | None = None,
    ) -> None:
        self._send = send
        self._rows: list[StepRow] = []
        self._sent_at = time.monotonic()
        self._start = self._data_s = self._optimizer_s = 0.0
        self._event = event
        self._began: Event | None = None
        self._passes: list[tuple[Event, Event]] = []
        self._open: Event | None = None

    def begin_step(self) -> None:
        """Starts the step's clock."""
        self._start = time.monotonic()
        self._data_s = self._optimizer_s = 0.0
        self._cut: float | None = None
        self._passes = []
        self._began = self._mark()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Counts what runs inside as computing on the device, up to `handed_over` if it is told."""
        self._open = self._mark()
        try:
            yield
        finally:
            self.handed_over(1.0)

    def handed_over(self, share: float) -> None:
        """Takes that ``share`` (0 … 1] of the gradient is handed over: with 1, computing ends."""
        if share >= 1 and self._open is not None:
            end = self._mark()
            if end is not None:
                self._passes.append((self._open, end))
            self._open = None

    def _mark(self) -> Event | None:
        if self._event is None:
            return None
        event = self._event()
        event.record()
        return event

    @contextmanager
    def data(self) -> Iterator[None]:
        """Counts what runs inside as fetching and moving samples."""
        began = time.monotonic()
        yield
        self._data_s += time.monotonic() - began

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Counts what runs inside as checking, clipping and the optimizer's step."""
        began = time.monotonic()
        if self._cut is None:
            self._cut = began
        yield
        self._optimizer_s += time.monotonic() - began

    def cut_at(self, moment: float) -> None:
        """Tells when the last bucket was handed over; without it, the optimizer's start counts."""
        self._cut = moment

    def end_step(
        self,
        collectives: tuple[tuple[float, float], ...] = (),
        codec_s: float = 0.0,
        inside_s: float = 0.0,
    ) -> Stamps:
        """Stops the step's clock and returns its stamps."""
        end = time.monotonic()
        cut, compute_s = self._cut, None
        if self._began is not None and self._passes:
            last = self._passes[-1][1]
            last.synchronize()
            compute_s = sum(begin.elapsed_time(stop) for begin, stop in self._passes) / 1e3
            cut = self._start + self._began.elapsed_time(last) / 1e3
        return Stamps(
            start=self._start,
            end=end,
            cut=end if cut is None else cut,
            compute_s=compute_s,
            data_s=self._data_s,
            optimizer_s=self._optimizer_s,
            codec_s=codec_s,
            inside_s=inside_s,
            collectives=collectives,
        )

    def add(self, row: StepRow) -> None:
        """Takes a finished row; sends the rows when the last sending is long enough ago."""
        self._rows.append(row)
        if time.monotonic() - self._sent_at >= SEND_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Sends the rows that were not sent yet."""
        if self._rows:
            self._send(self._rows)
            self._rows = []
        self._sent_at = time.monotonic()
