import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.devices.device import Device
from hetkit.devices.fleet import Fleet, parse_fleet


def test_a_fleet_is_a_frozen_sequence() -> None:
    fleet = hk.emulate("2xA100 + 1xT4")
    assert isinstance(fleet, Sequence)
    assert len(fleet) == 3
    assert fleet[-1].name == "T4"
    assert isinstance(fleet[:2], Fleet)
    assert fleet[:2].labels == ("A100 #0", "A100 #1")
    with pytest.raises(dataclasses.FrozenInstanceError):
        fleet.devices = ()  # type: ignore[misc]


def test_it_shows_as_text_and_html_and_says_that_it_is_emulated() -> None:
    fleet = hk.emulate("1xA100 + 1x<b>", pace={"<b>": 1}, link="2GB/s, 50us")
    text, html = repr(fleet), fleet._repr_html_()
    assert text.splitlines()[0] == "Fleet of 2 devices, emulated"
    assert all("emulated" in line for line in text.splitlines()[2:])
    assert "2 GB/s, 50 µs" in text
    assert "<b>" not in html
    assert "emulated" in html
    assert "emulated" not in repr(parse_fleet("cpu"))


def test_real_and_emulated_do_not_mix() -> None:
    with pytest.raises(hk.DeviceError, match="clocks differ"):
        parse_fleet(["cpu", hk.emulate("1xT4")[0]])


def test_devices_travel_in_messages() -> None:
    for device in hk.emulate("1xA100", slow_down={"A100": hk.SlowDown(at_s=1, factor=2)}):
        wire = msgspec.msgpack.encode(device)
        assert msgspec.msgpack.decode(wire, type=Device) == device


def test_fleets_can_be_joined_and_cut() -> None:
    one, two = hk.emulate("2xA100"), hk.emulate("1xA100 + 1xV100")
    joined = parse_fleet([*one, *two])
    assert joined.labels == ("A100 #0", "A100 #1", "A100 #2", "V100 #3")
    assert parse_fleet([one, two]) == joined
    assert parse_fleet(one) is one
    assert parse_fleet(two[1]).labels == ("V100 #1",)
    with pytest.raises(hk.DeviceError, match="2 times"):
        parse_fleet([one, one[0]])


@given(st.integers(1, 32))
def test_every_way_to_say_so_many_cpus(count: int) -> None:
    wanted = tuple(f"cpu:{i}" for i in range(count))
    ways: list[Any] = [f"cpu*{count}", f"{count}xCPU", ", ".join(["cpu"] * count), ["cpu"] * count]
    for way in ways:
        assert tuple(device.key for device in parse_fleet(way)) == wanted


@given(
    st.one_of(
        st.text(max_size=20),
        st.text(alphabet="cpuda:0123456789*x×,+ ", max_size=12),
        st.lists(st.one_of(st.text(max_size=8), st.none(), st.integers()), max_size=3),
        st.sampled_from([None, 0, 1.5, b"cpu", {}, {"cpu": 1}, object(), (), [[]], ["cpu*0"]]),
    )
)
def test_junk_is_refused_with_a_device_error(junk: Any) -> None:
    try:
        fleet = parse_fleet(junk)
    except hk.DeviceError:
        return
    assert len(fleet) >= 1


def test_the_host_memory_is_shared(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(driver=False)
    alone = parse_fleet("cpu")[0].memory_bytes
    assert alone is not None
    assert [d.memory_bytes for d in parse_fleet("cpu*2")] == [alone // 2] * 2
