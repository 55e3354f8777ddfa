from contextlib import suppress

import pytest
import torch

from hetkit.launch.messages import StepRow
from hetkit.worker import meter as module
from hetkit.worker.meter import Meter


class FakeTime:
    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(module, "time", fake)
    return fake


def make_row(meter: Meter, step: int) -> StepRow:
    meter.begin_step()
    return StepRow(
        step=step,
        epoch=0,
        batch=1,
        micro_steps=1,
        stamps=meter.end_step(),
        loss_sum=1.0,
        count=1.0,
        wire_bytes=0.0,
    )


def test_the_parts_of_a_step_add_up_over_their_micro_batches(time):
    meter = Meter(lambda rows: None)
    meter.begin_step()
    for _ in range(3):
        with meter.data():
            time.now += 0.1
        time.now += 1.0
    meter.cut_at(time.now)
    time.now += 0.5
    with meter.optimizer():
        time.now += 0.2
    stamps = meter.end_step(((52.0, 53.0),), 0.25)
    assert (stamps.start, stamps.cut, stamps.end) == pytest.approx((50.0, 53.3, 54.0))
    assert (stamps.data_s, stamps.optimizer_s) == pytest.approx((0.3, 0.2))
    assert (stamps.codec_s, stamps.collectives) == (0.25, ((52.0, 53.0),))


def test_without_an_exchange_computing_ends_where_the_optimizer_begins(time):
    meter = Meter(lambda rows: None)
    meter.begin_step()
    time.now += 1.0
    with meter.optimizer():
        time.now += 0.5
    assert meter.end_step().cut == 51.0
    meter.begin_step()
    time.now += 2.0
    assert meter.end_step().cut == time.now, "nothing is left of the step before"


def test_rows_are_sent_ten_times_a_second_at_most_and_none_is_lost(time):
    sent: list[list[int]] = []
    meter = Meter(lambda rows: sent.append([row.step for row in rows]))
    for step in range(100):
        time.now += 0.013
        meter.add(make_row(meter, step))
    meter.flush()
    meter.flush()
    assert [step for rows in sent for step in rows] == list(range(100))
    assert len(sent) <= 1 + 100 * 0.013 / module.SEND_EVERY_S
    assert len(sent) > 5


def test_rows_that_were_sent_are_not_touched_again(time):
    sent: list[list[StepRow]] = []
    meter = Meter(sent.append)
    for step in range(2):
        meter.add(make_row(meter, step))
        meter.flush()
    assert [[row.step for row in rows] for rows in sent] == [[0], [1]]


def test_an_error_inside_a_part_passes_through(time):
    meter = Meter(lambda rows: None)
    meter.begin_step()
    with pytest.raises(KeyError), meter.data():
        raise KeyError("sample")


class FakeDevice:
    """A stream that works behind the host's back: an event is where the stream then ends."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.busy_until = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.time.now) + seconds

    def event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.busy_until, self.device.time.now)

    def synchronize(self) -> None:
        self.device.time.now = max(self.device.time.now, self.at)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.at - self.at)


def test_on_a_gpu_its_own_clock_counts(time):
    device = FakeDevice(time)
    meter = Meter(lambda rows: None, device.event)
    meter.begin_step()
    with meter.data():
        time.now += 0.5  # the device has nothing to do
    with meter.computing():
        time.now += 0.1  # the host launches, and goes on
        device.launch(2.0)
    with meter.data():
        time.now += 1.0  # beside the device's work
    with meter.computing():
        device.launch(3.0)
        meter.handed_over(0.5)
        device.launch(1.0)
        meter.handed_over(1.0)
        meter.cut_at(time.now)  # where the host was
        device.launch(0.7)  # what runs after the hand-over is no computing
    stamps = meter.end_step()
    assert stamps.compute_s == pytest.approx(0.1 + 2.0 + 4.0)
    assert stamps.cut - stamps.start == pytest.approx(0.5 + 0.1 + 2.0 + 4.0)
    assert stamps.data_s == pytest.approx(1.5)


def test_a_pass_that_fails_has_taken_its_time(time):
    device = FakeDevice(time)
    meter = Meter(lambda rows: None, device.event)
    meter.begin_step()
    with suppress(MemoryError), meter.computing():
        device.launch(2.0)
        raise MemoryError
    with meter.computing():
        device.launch(1.0)
    assert meter.end_step().compute_s == pytest.approx(3.0)


def test_a_step_without_a_pass_has_the_hosts_cut(time):
    meter = Meter(lambda rows: None, FakeDevice(time).event)
    meter.begin_step()
    time.now += 1.0
    stamps = meter.end_step()
    assert stamps.compute_s is None
    assert stamps.cut == stamps.end


def test_where_the_host_computes_its_clock_counts():
    assert module.device_event(torch.device("cpu")) is None
