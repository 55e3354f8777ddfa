import itertools

import pytest
import torch

import hetkit as hk
from hetkit.devices.device import Device, Emulation
from hetkit.worker.emulation import EmulatedMemory, EmulatedOutOfMemoryError
from hetkit.worker.memory import MemoryMeter, training_bytes

CPU = torch.device("cpu")


def make_task(optimizer, **more) -> hk.Task:
    return hk.Task(
        model=lambda: None,
        data=[0],
        loss=lambda model, batch: None,
        optimizer=optimizer,
        **more,
    )


def test_an_emulated_device_reports_its_own_memory_and_its_peak():
    emulation = Emulation(memory_bytes=1000)
    device = Device(name="T4", kind="cpu", index=0, key="e:0", emulation=emulation)
    meter = MemoryMeter(CPU, EmulatedMemory(device, 100.0, 10.0))
    readings = [meter.read(micro_batch) for micro_batch in (10, 50, 20)]
    assert [reading.used_bytes for reading in readings] == [200, 600, 300]
    assert [reading.peak_bytes for reading in readings] == [200, 600, 600]
    with pytest.raises(EmulatedOutOfMemoryError):
        meter.read(91)


def test_on_the_cpu_it_is_the_process_that_counts(monkeypatch):
    now = itertools.count().__next__
    monkeypatch.setattr("hetkit.worker.memory.time.monotonic", now)
    meter = MemoryMeter(CPU, None)
    before = meter.read(1)
    kept = torch.ones(8_000_000)
    after = meter.read(1)
    assert after.used_bytes - before.used_bytes > 0.5 * kept.numel() * 4
    assert after.peak_bytes >= after.used_bytes


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 2),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3),
        (lambda p: torch.optim.AdamW(p), 4),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_training_keeps_weights_gradients_and_the_optimizers_state(optimizer, copies):
    model = torch.nn.Linear(100, 100)
    before = [p.detach().clone() for p in model.parameters()]
    found = training_bytes(make_task(optimizer), model)
    assert found == pytest.approx(copies * 4 * 10_100, rel=0.001)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_and_buffers_count_once():
    model = torch.nn.Linear(100, 100, bias=False).requires_grad_(False)
    model.register_buffer("table", torch.zeros(50, dtype=torch.float64))
    model.head = torch.nn.Linear(10, 1, bias=False)
    found = training_bytes(make_task(lambda p: torch.optim.SGD(p, lr=0.1)), model)
    assert found == 4 * 10_000 + 8 * 50 + 2 * 4 * 10


def test_groups_and_an_average_of_the_weights_count_too():
    model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 1))
    task = make_task(
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        parameters=lambda model: [
            {"params": model[0].named_parameters(), "lr": 0.01},
            {"params": [*model[1].named_parameters()]},
        ],
        ema=0.9,
    )
    assert training_bytes(task, model) == 4 * 4 * (10_000 + 101)


def test_two_measured_peaks_tell_what_fits_into_a_card(monkeypatch):
    peaks = {8: 1080.0, 32: 1320.0}
    now = [8]
    fake = {
        "memory_allocated": lambda device: 900,
        "max_memory_allocated": lambda device: peaks[now[0]],
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": lambda device: (500, 4000),
        "memory_reserved": lambda device: 1500,
    }
    for name, value in fake.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    meter = MemoryMeter(torch.device("cuda"), None)
    for size in (8, 8, 32):
        now[0] = size
        meter.read(size)
    assert meter.largest_fit() is None
    meter.read(32, whole=False)
    assert meter.largest_fit() is None
    reading = meter.read(32)
    assert reading.used_bytes == 900
    assert reading.peak_bytes == 1320
    # 92 % of what is free or ours, less p = 1000, by q = 10.
    assert meter.largest_fit() == (2000 * 0.92 - 1000) // 10


def test_on_the_cpu_peaks_promise_nothing():
    meter = MemoryMeter(CPU, None)
    for size in (1, 1, 2, 2):
        meter.read(size)
    assert meter.largest_fit() is None


def test_a_pass_that_the_emulated_device_does_not_hold_is_refused():
    emulation = Emulation(memory_bytes=1000)
    device = Device(name="T4", kind="cpu", index=0, key="e:0", emulation=emulation)
    meter = MemoryMeter(CPU, EmulatedMemory(device, 100.0, 10.0))
    meter.take(90)
    with pytest.raises(EmulatedOutOfMemoryError) as caught:
        meter.take(91)
    text = meter.nothing_fits(caught.value)
    assert "single sample" in text
    assert "0.00 GB in all" in text


def test_what_to_say_where_nothing_fits_names_the_first_line_only():
    text = MemoryMeter(CPU, None).nothing_fits(torch.OutOfMemoryError("first\nsecond"))
    assert "memory: first." in text
    assert "second" not in text
