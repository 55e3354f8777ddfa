"""The emulated link, on a clock that the test moves."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.devices.device import Link
from hetkit.planning.exchange_time import ring_bytes, ring_seconds, spread_seconds
from hetkit.worker import emulated_link
from hetkit.worker.emulated_link import EmulatedLink


class FakeTime:
    """Stands for the module ``time``: only sleeping and the test move it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(emulated_link, "time", time)
    return time


def test_a_message_takes_latency_and_bytes_by_rate(fake: FakeTime) -> None:
    link = EmulatedLink(Link(latency_s=0.001, bytes_per_s=1e6), world_size=4, time_scale=2.0)
    start = fake.now
    link.occupy(start, 1_000_000)
    expected = 2 * (6 * 0.001 + ring_bytes(4, 1e6) / 1e6)
    assert fake.now - start == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_kind_of_exchange_takes_what_planning_says(fake: FakeTime, world_size: int) -> None:
    rate = Link(latency_s=0.002, bytes_per_s=1e6)
    link = EmulatedLink(rate, world_size, time_scale=1.0)
    whole_s = ring_seconds(world_size, ring_bytes(world_size, 3e5), rate)

    def took(occupy: Any) -> float:
        start = fake.now
        occupy(start, 300_000)
        return fake.now - start

    assert took(link.occupy) == pytest.approx(whole_s)
    assert took(link.occupy_half) == pytest.approx(whole_s / 2), "to all, or from all"
    assert took(link.occupy_spread) == pytest.approx(spread_seconds(world_size, 3e5, rate))


def test_messages_pass_one_after_the_other(fake: FakeTime) -> None:
    link = EmulatedLink(Link(bytes_per_s=1e6), world_size=2, time_scale=1.0)
    start = fake.now
    link.occupy(start, 500_000)
    assert fake.now - start == pytest.approx(0.5)
    link.occupy(start + 0.1, 500_000)  # was ready while the first was on its way
    assert fake.now - start == pytest.approx(1.0)
    link.occupy(start + 3.0, 500_000)
    assert fake.now - start == pytest.approx(3.5), "a late one begins when it comes"


@given(
    messages=st.lists(
        st.tuples(st.floats(0.0, 2.0), st.integers(0, 2_000_000)), min_size=1, max_size=8
    )
)
def test_the_link_is_never_faster_than_its_bytes(messages: list[tuple[float, int]]) -> None:
    fake = FakeTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_link, "time", fake)
        link = EmulatedLink(Link(bytes_per_s=1e6), world_size=2, time_scale=1.0)
        start = fake.now
        for gap, size in messages:
            arrival = fake.now + gap
            fake.now = arrival
            link.occupy(arrival, size)
            assert fake.now >= arrival + size / 1e6 - 1e-6
        assert fake.now - start >= sum(size for _, size in messages) / 1e6 - 1e-6


def test_a_free_link_costs_nothing(fake: FakeTime) -> None:
    before = fake.now
    EmulatedLink(Link(), world_size=8, time_scale=1.0).occupy(before, 10**9)
    assert fake.now == before
