"""Tests of how much faster a precision is taken to be where it was not tried."""

from dataclasses import replace

import pytest

from hetkit.devices.device import Device
from hetkit.devices.fleet import emulate
from hetkit.plan import Plan
from hetkit.planning.precision_gain import precision_gains

OFF = Plan(
    version=1,
    epoch=0,
    first_step=0,
    epoch_first_step=0,
    epoch_steps=10,
    global_batch=4,
    batches=(2, 2),
    micro_batches=(2, 2),
    amp=("off", "off"),
    compression="none",
)
HALF = replace(OFF, amp=("bf16", "fp16"))


def test_the_same_precision_gains_nothing_and_needs_no_basis():
    for gain in precision_gains(emulate("1xA100 + 1xV100").devices, OFF, OFF):
        assert (gain.least, gain.likely, gain.most, gain.basis) == (1.0, 1.0, 1.0, "")


def test_an_emulated_card_gains_what_it_emulates_within_the_cards_ends():
    devices = emulate("1xA100 + 1xV100", matmul_share=0.5).devices
    for device, gain, mode in zip(
        devices, precision_gains(devices, OFF, HALF), HALF.amp, strict=True
    ):
        assert gain.likely == pytest.approx(device.emulation.amp_pace[mode])
        assert gain.least < gain.likely < gain.most


def test_there_and_back_is_one():
    devices = emulate("1xA100 + 1xV100").devices
    there, back = precision_gains(devices, OFF, HALF), precision_gains(devices, HALF, OFF)
    for one, other in zip(there, back, strict=True):
        assert one.likely * other.likely == pytest.approx(1.0)


def test_a_device_without_figures_says_so():
    cpu = Device(name="cpu", kind="cpu", index=0, key="cpu:0")
    one = replace(OFF, global_batch=2, batches=(2,), micro_batches=(2,), amp=("off",))
    (gain,) = precision_gains([cpu], one, replace(one, amp=("bf16",)))
    assert gain.likely == 1.0
    assert "no figure" in gain.basis
