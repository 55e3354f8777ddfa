from collections.abc import Callable
from typing import Any

import pytest

from hetkit.devices.nvml import Card, Reading
from hetkit.devices.real import as_device, cuda_devices, why_no_cuda


@pytest.mark.usefixtures("cuda_torch")
def test_devices_come_by_ordinal(
    fake_nvml: Callable[..., Any], unlike_cards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(*unlike_cards)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [(d.index, d.uuid) for d in cuda_devices()] == [(0, "GPU-aa"), (1, "GPU-bb")]


def test_without_torch_for_cuda_the_log_says_so(
    fake_nvml: Callable[..., Any],
    make_card: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetkit.devices.real.torch_build", lambda: None)
    fake_nvml(make_card())
    assert cuda_devices() == ()
    assert "PyTorch is not installed" in caplog.text
    assert why_no_cuda() == "PyTorch is not installed"


def test_a_card_that_tells_little_is_a_device_all_the_same() -> None:
    card = Card(nvml_index=3, ordinal=1, pci_address="0000:81:00.0")
    device = as_device(Reading(card=card))
    assert (device.name, device.key) == ("NVIDIA card", "cuda:0000:81:00.0")
    assert (device.spec, device.memory_bytes) == (None, None)
    with pytest.raises(ValueError, match="does not see"):
        as_device(Reading(card=Card(nvml_index=3)))
