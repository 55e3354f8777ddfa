"""The ring's bytes and seconds, and the link that sets its pace."""

import pytest

from hetkit.devices.device import Device, Emulation, Link
from hetkit.errors import PlanError
from hetkit.planning.exchange_time import ring_bytes, ring_seconds, slowest_link


def emulated(index: int, *, host: str = "a", rate: float = 1e9, latency_s: float = 0.0) -> Device:
    emulation = Emulation(
        intra_link=Link(latency_s=latency_s, bytes_per_s=rate),
        inter_link=Link(latency_s=latency_s * 10, bytes_per_s=rate / 10),
    )
    return Device(
        name="T4", kind="cpu", index=index, key=str(index), host=host, emulation=emulation
    )


def test_traffic_per_rank_stays_below_twice_the_gradient() -> None:
    assert [ring_bytes(n, 100) for n in (1, 2, 4)] == [0, 100, 150]
    assert ring_bytes(1000, 100) < 200


def test_seconds_are_latency_and_bytes() -> None:
    link = Link(latency_s=0.001, bytes_per_s=100.0)
    assert ring_seconds(1, 0, link) == 0
    assert ring_seconds(4, 150, link) == pytest.approx(6 * 0.001 + 1.5)
    assert ring_seconds(4, 150, Link()) == 0


@pytest.mark.parametrize(("n", "count"), [(0, 1.0), (2, -1.0), (2, float("nan"))])
def test_nonsense_is_refused(n: int, count: float) -> None:
    with pytest.raises(PlanError, match="ring"):
        ring_bytes(n, count)
    with pytest.raises(PlanError, match="ring"):
        ring_seconds(n, count, Link())


def test_the_worst_latency_and_the_worst_rate_set_the_pace() -> None:
    fleet = [emulated(0, rate=1e9, latency_s=1e-3), emulated(1, rate=1e8)]
    assert slowest_link(fleet) == Link(latency_s=1e-3, bytes_per_s=1e8)


def test_several_hosts_meet_over_the_link_between_them() -> None:
    fleet = [emulated(0), emulated(1, host="b")]
    assert slowest_link(fleet) == Link(bytes_per_s=1e8)


def test_the_link_of_a_real_device_is_not_known() -> None:
    real = Device(name="cpu", kind="cpu", index=0, key="cpu:0")
    assert slowest_link([real]) is None
    assert slowest_link([emulated(1), real]) is None


def test_no_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="no devices"):
        slowest_link([])
