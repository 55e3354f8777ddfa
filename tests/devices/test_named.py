import os
from collections.abc import Callable
from typing import Any

import pytest

import hetkit as hk
from hetkit.devices.fleet import parse_fleet


def keys(devices: object) -> list[str]:
    return [device.key for device in parse_fleet(devices)]


def test_auto_without_a_driver_is_one_cpu(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(driver=False)
    assert keys("auto") == keys(" AUTO ") == ["cpu:0"]


@pytest.mark.usefixtures("cuda_torch")
def test_auto_takes_every_card(fake_nvml: Callable[..., Any], unlike_cards: list[Any]) -> None:
    fake_nvml(*unlike_cards)
    slow, fast = parse_fleet("auto")
    assert (slow.key, slow.torch_device, slow.spec.name) == ("cuda:GPU-bb", "cuda:0", "GTX 1080 Ti")
    assert (fast.key, fast.torch_device, fast.spec.name) == ("cuda:GPU-aa", "cuda:1", "RTX 3090")
    assert fast.memory_bytes == 24 * 2**30
    assert not parse_fleet("auto").emulated


@pytest.mark.usefixtures("cuda_torch")
def test_cards_by_number_in_the_order_given(
    fake_nvml: Callable[..., Any], unlike_cards: list[Any]
) -> None:
    fake_nvml(*unlike_cards)
    assert keys("cuda:1, cuda:0") == ["cuda:GPU-aa", "cuda:GPU-bb"]
    assert keys("cuda") == ["cuda:GPU-bb", "cuda:GPU-aa"]
    assert keys("CUDA:0 + cpu*2") == ["cuda:GPU-bb", "cpu:0", "cpu:1"]
    assert keys(["cuda:0", "cpu"]) == ["cuda:GPU-bb", "cpu:0"]
    with pytest.raises(hk.DeviceError, match="'cuda:GPU-bb' is given 2 times"):
        parse_fleet("cuda:0, cuda:0")
    with pytest.raises(hk.DeviceError, match="no device 'cuda:2': there are cuda:0, cuda:1"):
        parse_fleet("cuda:0, cuda:2")


@pytest.mark.usefixtures("cuda_torch")
def test_cards_that_cuda_does_not_see(
    fake_nvml: Callable[..., Any], unlike_cards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(*unlike_cards)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert keys("auto") == ["cuda:GPU-aa"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert keys("auto") == ["cpu:0"]
    with pytest.raises(hk.DeviceError, match="CUDA_VISIBLE_DEVICES hides every card"):
        parse_fleet("cuda:0")


def test_a_pytorch_without_cuda_leaves_the_cards_alone(
    fake_nvml: Callable[..., Any], unlike_cards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetkit.devices import real
    from hetkit.devices.host import TorchBuild

    monkeypatch.setattr(real, "torch_build", lambda: TorchBuild(version="2.13.0+cpu"))
    fake_nvml(*unlike_cards)
    assert keys("auto") == ["cpu:0"]
    with pytest.raises(hk.DeviceError, match=r"2\.13\.0\+cpu is built without CUDA"):
        parse_fleet("cuda:0")


def test_no_driver_is_said(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(driver=False)
    with pytest.raises(hk.DeviceError, match="Driver Not Loaded"):
        parse_fleet("cuda:0")
    with pytest.raises(hk.DeviceError, match="Driver Not Loaded"):
        parse_fleet("cuda")
    fake_nvml()
    with pytest.raises(hk.DeviceError, match="lists no card"):
        parse_fleet("cuda:0")


def test_inline_is_this_process() -> None:
    assert keys("inline") == [f"inline:{os.getpid()}"]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("", "no device ''; allowed are"),
        ([], "at least one device"),
        ("cpu*0", "'cpu\\*0': a count must be from 1"),
        ("cpu*99999", "a count"),
        ("cpu*2.5", "no device"),
        ("tpu", "no device 'tpu'; allowed are \"auto\""),
        ("cuda:", "no device"),
        ("cuda:-1", "no device"),
        ("cpu,,cpu", "no device"),
        ("2xA100", "say hk.emulate\\('2xA100'\\)"),
        ("auto, cpu", "no device 'auto'"),
        (None, "cannot be None"),
        (3, "cannot be 3"),
        ([3], "3 is not a device"),
        (b"cpu", "cannot be"),
    ],
)
def test_refused(devices: object, words: str) -> None:
    with pytest.raises(hk.DeviceError, match=words):
        parse_fleet(devices)


def test_new_cpus_take_the_free_numbers() -> None:
    second = parse_fleet("cpu*2")[1]
    assert keys([second, "cpu*2"]) == ["cpu:1", "cpu:0", "cpu:2"]
