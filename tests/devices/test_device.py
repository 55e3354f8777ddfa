import dataclasses
import math
import pickle
from typing import Any

import pytest

import hetkit as hk
from hetkit.devices.device import Device, Emulation


@pytest.mark.parametrize(
    ("make", "figures", "name"),
    [
        (hk.Link, {"latency_s": -1}, "latency_s"),
        (hk.Link, {"latency_s": "50us"}, "latency_s"),
        (hk.Link, {"bytes_per_s": 0}, "bytes_per_s"),
        (hk.Link, {"bytes_per_s": math.nan}, "bytes_per_s"),
        (hk.SlowDown, {"at_s": 1, "factor": 0}, "factor"),
        (hk.SlowDown, {"at_s": None, "factor": 2}, "at_s"),
        (Emulation, {"pace": True}, "pace"),
        (Emulation, {"time_scale": 0}, "time_scale"),
        (Emulation, {"launch_s": -1}, "launch_s"),
        (Emulation, {"jitter": math.nan}, "jitter"),
        (Emulation, {"sample_s": 0}, "sample_s"),
    ],
)
def test_refused(make: Any, figures: dict[str, Any], name: str) -> None:
    with pytest.raises(hk.DeviceError, match=f"{name} must be a number"):
        make(**figures)


def test_kinds() -> None:
    card = Device(name="T4", kind="cuda", index=1, key="cuda:GPU-1")
    assert (card.torch_device, card.label, card.emulated) == ("cuda:1", "T4 #1", False)
    with pytest.raises(hk.DeviceError, match="'rocm'"):
        Device(name="MI300X", kind="rocm", index=0, key="x")


def test_devices_are_frozen_hashable_and_can_be_pickled() -> None:
    device = hk.emulate("1xA100")[0]
    assert pickle.loads(pickle.dumps(device)) == device
    assert len({device, dataclasses.replace(device)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.index = 3  # type: ignore[misc]
