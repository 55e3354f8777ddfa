"""Which ranks are an island, over which library they speak, and when islands pay."""

from dataclasses import replace

import pytest

from hetkit.devices.device import Device, DeviceSpec, Emulation, Link
from hetkit.planning.islands import common_backend, islands_pay, natural_islands

HOSTS = "abbbcc"


def device(text: str, index: int = 0) -> Device:
    """``"a:nvidia"`` is a card of that vendor on host a, ``"a:card"`` an unknown one."""
    host, _, vendor = text.partition(":")
    spec = DeviceSpec(name="x", vendor=vendor) if vendor not in ("card", "cpu") else None
    kind = "cpu" if vendor == "cpu" else "cuda"
    return Device(name="x", kind=kind, index=index, key=text, host=host, spec=spec)


def fleet(text: str) -> list[Device]:
    return [device(each, rank) for rank, each in enumerate(text.split())]


def emulated(inter: Link) -> list[Device]:
    emulation = Emulation(intra_link=Link(bytes_per_s=10e9), inter_link=inter)
    return [replace(device(f"{host}:cpu"), emulation=emulation) for host in HOSTS]


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ("a:nvidia a:nvidia b:nvidia", "nccl"),
        ("a:amd a:amd", "nccl"),
        ("a:card a:nvidia", "nccl"),
        ("a:amd a:nvidia", "gloo"),
        ("a:nvidia a:cpu", "gloo"),
        ("a:cpu a:cpu", "gloo"),
    ],
)
def test_a_library_is_for_the_cards_of_one_vendor(devices: str, backend: str) -> None:
    assert common_backend(fleet(devices)) == backend


@pytest.mark.parametrize(
    ("devices", "islands"),
    [
        ("a:nvidia b:nvidia a:nvidia b:card", ((0, 2), (1, 3))),
        ("a:cpu a:cpu b:cpu", ((0, 1), (2,))),
        ("a:nvidia a:nvidia a:amd a:amd", ((0, 1), (2, 3))),
        ("a:nvidia a:cpu a:nvidia b:cpu b:cpu", ((0, 2), (1,), (3, 4))),
        ("a:nvidia a:amd b:amd b:nvidia b:amd", ((0,), (1,), (2, 4), (3,))),
        ("a:nvidia a:nvidia", ((0, 1),)),
    ],
)
def test_islands_are_the_hosts_or_their_parts_with_one_library(
    devices: str, islands: tuple[tuple[int, ...], ...]
) -> None:
    assert natural_islands(fleet(devices)) == islands


@pytest.mark.parametrize(
    ("inter", "compression", "pay"),
    [
        (Link(bytes_per_s=1e9), "none", True),
        (Link(bytes_per_s=1e9), "fp16", False),
        (Link(bytes_per_s=5e8), "fp16", True),
        (Link(bytes_per_s=1e9), "task:mine", True),
        (Link(bytes_per_s=10e9), "none", False),
        (Link(bytes_per_s=1e9), "topk(ratio=0.01)", False),
        (Link(bytes_per_s=1e9, latency_s=0.01), "topk(ratio=0.01)", True),
    ],
)
def test_islands_pay_where_less_on_the_slow_links_is_more_than_the_sums_inside(
    inter: Link, compression: str, pay: bool
) -> None:
    devices = emulated(inter)
    assert islands_pay(devices, natural_islands(devices), compression) == pay


def test_where_the_links_are_not_known_islands_are_reason_enough() -> None:
    assert islands_pay(fleet("a:cpu a:cpu b:cpu"), ((0, 1), (2,)))
