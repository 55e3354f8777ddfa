"""The meter: one rank's account of each step, sent at most ten times a second."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetkit.launch.messages import StepRow
from hetkit.planning.time_split import Stamps

SEND_EVERY_S = 0.1


class Meter:
    """Stamps the parts of a step and collects the rows.

    Args:
        send: Called with the new rows when it is time, or when `flush` is.

    Example:
        >>> meter = Meter(print)
        >>> meter.begin_step()
        >>> with meter.data():
        ...     pass
        >>> stamps = meter.end_step()
        >>> stamps.start <= stamps.start + stamps.data_s <= stamps.end
        True
    """

    def __init__(self, send: Callable[[list[StepRow]], None]) -> None:
        self._send = send
        self._rows: list[StepRow] = []
        self._sent_at = time.monotonic()
        self._start = self._data_s = self._optimizer_s = 0.0

    def begin_step(self) -> None:
        """Starts the step's clock."""
        self._start = time.monotonic()
        self._data_s = self._optimizer_s = 0.0
        self._cut: float | None = None

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
        return Stamps(
            start=self._start,
            end=end,
            cut=end if self._cut is None else self._cut,
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
