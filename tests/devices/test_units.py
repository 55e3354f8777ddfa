import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit import DeviceError, Link
from hetkit.devices.units import (
    parse_links,
    parse_memory,
    parse_rate,
    parse_seconds,
    show_memory,
    show_rate,
)

JUNK = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789.eE+-kKMGTiBbit/s µu,", max_size=14),
    st.floats(),
    st.integers(),
    st.sampled_from([None, True, (), [1], b"16GB", 10**400, -(10**400), object()]),
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        ("1.5gb", 3 * 2**29),
        ("512MiB", 2**29),
        ("2TB", 2**41),
        ("100B", 100),
        (7, 7),
        (1e9, 10**9),
    ],
)
def test_memory(text: object, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["16", "GB", "-1GB", "0GB", "1e999GB", "16GB/s", "16Gbit", 0, 0.5])
def test_memory_refused(text: object) -> None:
    with pytest.raises(DeviceError, match=r"memory|number"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2GB/s", 2e9),
        ("2 GiB/s", 2.0**31),
        ("25Gbit/s", 25e9 / 8),
        ("100kB/s", 1e5),
        (5, 5.0),
    ],
)
def test_rate(text: object, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["2GB", "2gb/s", "2Gb/s", "fast", "0GB/s", math.inf, math.nan])
def test_rate_refused(text: object) -> None:
    with pytest.raises(DeviceError, match=r"rate|number"):
        parse_rate(text)


def test_seconds() -> None:
    assert parse_seconds("50us") == pytest.approx(50e-6)
    assert parse_seconds("50µs") == parse_seconds("50μs") == parse_seconds("50us")
    assert parse_seconds(0) == 0
    with pytest.raises(DeviceError, match="50 weeks"):
        parse_seconds("50 weeks")


def test_links() -> None:
    assert parse_links(None) == (Link(), Link())
    assert parse_links("2GB/s") == (Link(bytes_per_s=2e9),) * 2
    link = parse_links("50us, 2GB/s")[0]
    assert (link.bytes_per_s, link.latency_s) == (2e9, pytest.approx(50e-6))
    assert parse_links(2e9) == parse_links("2GB/s")
    intra, inter = parse_links({"intra": Link(bytes_per_s=3e11), "inter": "25Gbit/s"})
    assert (intra.bytes_per_s, inter.bytes_per_s) == (3e11, 25e9 / 8)
    assert parse_links({"inter": "1GB/s"})[0] == Link()


@pytest.mark.parametrize("link", ["2GB/s, 3GB/s", "", "slow", {"nvlink": 1}, -1, True, ["2GB/s"]])
def test_links_refused(link: object) -> None:
    with pytest.raises(DeviceError):
        parse_links(link)


@given(JUNK)
def test_junk_is_a_device_error_or_a_good_value(junk: object) -> None:
    for parse in (parse_memory, parse_rate, parse_seconds):
        try:
            value = parse(junk)
        except DeviceError:
            continue
        assert math.isfinite(value)
        assert value >= 0
    try:
        intra, inter = parse_links(junk)
    except DeviceError:
        return
    assert intra == inter


@given(st.integers(1, 10**6), st.sampled_from(["", "k", "M", "G", "T"]))
def test_round_trip(number: int, prefix: str) -> None:
    power = " kMGT".index(prefix or " ")
    assert parse_memory(f"{number}{prefix}B") == number * 1024**power
    assert parse_rate(f"{number} {prefix}B/s") == pytest.approx(number * 1000.0**power)
    assert parse_rate(f"{number}{prefix}bit/s") == pytest.approx(number * 1000.0**power / 8)


def test_show() -> None:
    assert show_memory(None) == show_rate(None) == "–"
    assert show_memory(16 * 2**30) == "16 GiB"
    assert show_memory(64 * 2**20) == "64 MiB"
    assert show_rate(2e9) == "2 GB/s"
    assert show_rate(5e5) == "0.5 MB/s"
    assert show_rate(math.inf) == "unlimited"
