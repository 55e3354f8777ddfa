"""The ring's bytes and seconds, the link that sets its pace, and islands beside the flat ring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.devices.device import Device, Emulation, Link
from hetkit.errors import PlanError
from hetkit.planning.exchange_time import (
    exchange_seconds,
    island_seconds,
    ring_bytes,
    ring_seconds,
    slowest_link,
    spread_seconds,
)


def emulated(
    index: int,
    *,
    host: str = "a",
    rate: float = 1e9,
    latency_s: float = 0.0,
    outside: float = 0.1,
) -> Device:
    """A device whose links to other hosts have so much of the rate, and ten times the latency."""
    emulation = Emulation(
        intra_link=Link(latency_s=latency_s, bytes_per_s=rate),
        inter_link=Link(latency_s=latency_s * 10, bytes_per_s=rate * outside),
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


def test_the_slowest_hop_may_lie_inside_a_host() -> None:
    hosts = [emulated(rank, host=host, outside=10.0) for rank, host in enumerate("aab")]
    assert slowest_link(hosts) == Link(bytes_per_s=1e9)
    assert slowest_link(hosts[1:]) == Link(bytes_per_s=1e10), "no hop inside a host"


def test_the_link_of_a_real_device_is_not_known() -> None:
    real = Device(name="cpu", kind="cpu", index=0, key="cpu:0")
    assert slowest_link([real]) is None
    assert slowest_link([emulated(1), real]) is None


def test_no_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="no devices"):
        slowest_link([])


# ── islands ──

HOSTS = "abbbcc"
ISLANDS = ((0,), (1, 2, 3), (4, 5))


def hosts(**links: float) -> list[Device]:
    return [emulated(rank, host=host, **links) for rank, host in enumerate(HOSTS)]


def test_the_phases_of_islands_add_up_and_each_waits_for_its_slowest() -> None:
    fleet = hosts(latency_s=1e-3)
    inside, outside = fleet[0].emulation.intra_link, fleet[0].emulation.inter_link
    expected = (
        ring_seconds(3, ring_bytes(3, 1e8), inside)
        + ring_seconds(3, ring_bytes(3, 1e8), outside)
        + spread_seconds(3, 1e8, inside)
    )
    assert island_seconds(fleet, ISLANDS, 1e8) == pytest.approx(expected)
    assert exchange_seconds(fleet, 1e8, islands=ISLANDS) == pytest.approx(expected)
    compressed = exchange_seconds(fleet, 1e8, islands=ISLANDS, sent_bytes=ring_bytes(3, 1e8) / 4)
    assert expected - compressed == pytest.approx(ring_bytes(3, 1e8) * 3 / 4 / 1e8)


def test_one_island_a_device_is_the_flat_ring() -> None:
    fleet = hosts(latency_s=1e-3)
    alone = [(rank,) for rank in range(len(fleet))]
    assert island_seconds(fleet, alone, 1e8) == pytest.approx(exchange_seconds(fleet, 1e8))


def test_unknown_links_make_no_time() -> None:
    real = [Device(name="cpu", kind="cpu", index=i, key=f"{i}", host="ab"[i % 2]) for i in range(4)]
    assert exchange_seconds(real, 1.0) is None
    assert island_seconds(real, ((0, 2), (1, 3)), 1.0) is None


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    outside=st.floats(0.001, 1.0),
    share=st.floats(0.0, 1.0),
)
def test_islands_are_never_faster_than_their_links(
    sizes: list[int], outside: float, share: float
) -> None:
    names = [host for host, size in enumerate(sizes) for _ in range(size)]
    fleet = [emulated(r, host=str(h), outside=outside) for r, h in enumerate(names)]
    islands = [tuple(r for r, h in enumerate(names) if h == host) for host in range(len(sizes))]
    leaders = ring_bytes(len(sizes), 1e8)
    seconds = exchange_seconds(fleet, 1e8, islands=islands, sent_bytes=leaders * share)
    inside = max(ring_bytes(size, 1e8) for size in sizes) / 1e9
    assert seconds >= leaders * share / (1e9 * outside) + inside - 1e-9
    assert seconds <= exchange_seconds(fleet, 1e8, islands=islands) + 1e-9
