"""The emulated device's clock and memory, on a clock that the test moves."""

import statistics

import pytest
import torch

from hetkit.devices.device import Device, Emulation, SlowDown
from hetkit.worker import emulation
from hetkit.worker.emulation import (
    DeviceClock,
    EmulatedMemory,
    EmulatedOutOfMemoryError,
)


class FakeTime:
    """Stands for the module ``time``: sleeping moves it, and so does what the test computes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def compute(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock_of(monkeypatch):
    """Returns a maker of device clocks on one fake time, its attribute ``time``."""
    fake = FakeTime()
    monkeypatch.setattr(emulation, "time", fake)

    def make(**given) -> DeviceClock:
        values = {"sample_s": 0.01, **given}
        return DeviceClock(Emulation(**values), values["sample_s"], rank=given.pop("rank", 0))

    make.time = fake
    return make


def test_compute_is_launch_plus_samples_by_pace_and_precision(clock_of):
    clock = clock_of(pace=2.0, launch_s=0.1, amp_pace={"fp16": 4.0}, time_scale=0.5)
    assert clock.compute_s(10, "off", 0, 0.0) == pytest.approx((0.1 + 10 * 0.01 / 2) / 2)
    assert clock.compute_s(10, "fp16", 0, 0.0) == pytest.approx((0.1 + 10 * 0.01 / 8) / 2)
    assert clock.compute_s(0, "off", 0, 0.0) == 0.0, "nothing is launched for no samples"


def test_slow_downs_come_at_their_time_and_multiply(clock_of):
    clock = clock_of(slow_downs=(SlowDown(at_s=10.0, factor=2.0), SlowDown(at_s=20.0, factor=1.5)))
    seconds = [clock.compute_s(10, "off", 0, at) for at in (0.0, 9.9, 10.0, 20.0)]
    assert seconds == pytest.approx([0.1, 0.1, 0.2, 0.3])


def test_a_slow_down_counts_from_the_first_step(clock_of):
    clock = clock_of(slow_downs=(SlowDown(at_s=1.0, factor=3.0),))
    spent = []
    for _ in range(12):
        before = clock_of.time.now
        clock.begin_step(0)
        clock.begin_micro_batch(10, "off")
        clock.forward_done()
        clock.backward_done(1.0)
        spent.append(clock_of.time.now - before)
    assert spent == pytest.approx([0.1] * 10 + [0.3] * 2)


def test_forward_takes_a_third_and_each_bucket_its_share_of_the_rest(clock_of):
    clock, time = clock_of(), clock_of.time
    clock.begin_step(0)
    clock.begin_micro_batch(30, "off")
    start = time.now
    time.compute(0.01)
    clock.forward_done()
    assert time.now - start == pytest.approx(0.1)
    time.compute(0.05)
    clock.backward_done(0.25)
    assert time.now - start == pytest.approx(0.15)
    clock.backward_done(1.0)
    assert time.now - start == pytest.approx(0.3)
    assert clock.real_s == pytest.approx(0.06)
    assert clock.late_s == 0.0


def test_real_compute_that_is_slower_than_the_device_is_told(clock_of):
    clock, time = clock_of(), clock_of.time
    clock.begin_step(0)
    clock.begin_micro_batch(30, "off")
    time.compute(0.25)  # the forward is late, and the backward catches up
    clock.forward_done()
    clock.backward_done(1.0)
    assert (clock.late_s, clock.due_s) == (0.0, pytest.approx(0.3))
    clock.begin_micro_batch(30, "off")
    time.compute(0.4)
    clock.backward_done(1.0)
    assert (clock.late_s, clock.due_s) == pytest.approx((0.1, 0.6))
    clock.begin_step(1)
    assert (clock.late_s, clock.due_s, clock.real_s) == (0.0, 0.0, 0.0)


def test_a_machine_is_outpaced_when_it_is_late_for_some_steps_running(clock_of):
    clock, time = clock_of(), clock_of.time
    told = []
    for step, real_s in enumerate([0.5] * 4 + [0.05] + [0.5] * 6 + [0.32] * 2):
        clock.begin_step(step)
        told.append(clock.outpaced)
        clock.begin_micro_batch(30, "off")
        time.compute(real_s)
        clock.backward_done(1.0)
    assert [step for step, outpaced in enumerate(told) if outpaced] == [10, 11]


def test_a_rank_without_samples_is_never_late(clock_of):
    clock, time = clock_of(), clock_of.time
    for step in range(10):
        clock.begin_step(step)
        clock.begin_micro_batch(0, "off")
        time.compute(0.1)
        clock.backward_done(1.0)
    assert not clock.outpaced


def noises(clock: DeviceClock, time: FakeTime, steps: range) -> list[float]:
    found = []
    for step in steps:
        clock.begin_step(step)
        before = time.now
        clock.begin_micro_batch(100, "off")
        clock.backward_done(1.0)
        found.append(time.now - before)
    return found


def test_jitter_is_seeded_by_seed_rank_and_step(clock_of):
    def draw(rank: int, steps: range = range(200), **given) -> list[float]:
        clock = DeviceClock(Emulation(jitter=0.1, **given), 0.01, rank)
        return noises(clock, clock_of.time, steps)

    first = draw(0)
    assert first == pytest.approx(draw(0))
    assert first[50:60] == pytest.approx(draw(0, range(50, 60))), "a resumed run draws the same"
    assert first != pytest.approx(draw(1))
    assert first != pytest.approx(draw(0, seed=1))
    assert statistics.mean(first) == pytest.approx(1.0, abs=0.03)
    assert statistics.stdev(first) == pytest.approx(0.1, rel=0.3)


def test_jitter_never_stops_or_turns_the_clock(clock_of):
    clock = DeviceClock(Emulation(jitter=50.0), 0.01, 0)
    assert min(noises(clock, clock_of.time, range(50))) >= 0.1 - 1e-9


# ── memory ──


def card(memory_bytes: int | None) -> Device:
    emulation = Emulation(memory_bytes=memory_bytes)
    return Device(name="T4", kind="cpu", index=3, key="e:3", emulation=emulation)


def test_memory_is_fixed_plus_samples_and_ends_where_the_device_does():
    memory = EmulatedMemory(card(1000), fixed_bytes=400.0, sample_bytes=10.0)
    assert memory.use(1) == 410.0
    assert memory.use(60) == 1000.0
    with pytest.raises(EmulatedOutOfMemoryError, match=r"T4 #3.*micro-batch of 61.*smaller"):
        memory.use(61)


def test_an_emulated_lack_of_memory_is_what_pytorch_raises():
    with pytest.raises(torch.OutOfMemoryError):
        EmulatedMemory(card(1), fixed_bytes=2.0, sample_bytes=0.0).use(1)


def test_a_device_of_unknown_size_holds_everything():
    assert EmulatedMemory(card(None), fixed_bytes=1e15, sample_bytes=1.0).use(1) == 1e15 + 1
