import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.devices.catalog import find_spec
from hetkit.devices.emulated import MOST_DEVICES, amp_pace, parse_terms

NAMES = st.sampled_from(["A100", "V100", "RTX 3090", "1080 Ti", "MI250X", "T4", "3090"])


@pytest.mark.parametrize("spec", ["2xA100 + 4xV100", "2×A100+4×V100", "2*A100 + 4 X V100"])
def test_terms(spec: str) -> None:
    assert parse_terms(spec) == ((2, "A100"), (4, "V100"))


@pytest.mark.parametrize(
    "spec",
    ["", " ", "+", "2x", "2xA100 +", "0xA100", "99999xA100", "1025xA100", "-1xA100", 5, None],
)
def test_terms_refused(spec: Any) -> None:
    with pytest.raises(hk.DeviceError):
        hk.emulate(spec)


def test_terms_are_hosts_and_indices_are_places() -> None:
    fleet = hk.emulate("2xA100 + 1xV100")
    assert [device.host for device in fleet] == ["host0", "host0", "host1"]
    assert fleet.labels == ("A100 #0", "A100 #1", "V100 #2")
    assert {device.torch_device for device in fleet} == {"cpu"}


def test_pace_from_the_catalogue_is_the_geometric_mean_with_the_slowest_at_1() -> None:
    paces = [d.emulation.pace for d in hk.emulate("1xA100 + 1xV100")]
    assert paces == pytest.approx([math.sqrt(19.5 / 15.7 * 1555 / 900), 1.0])


def test_pace_as_given() -> None:
    fleet = hk.emulate("2xA100 + 1xV100", pace={"a100": 2.3, "A100 #1": 2})
    assert [d.emulation.pace for d in fleet] == [2.3, 2.0, 1.0]


def test_a_device_of_ones_own_needs_its_pace() -> None:
    mine = hk.emulate("1xMyCard + 1xT4", pace={"MyCard": 3})[0]
    assert (mine.spec, mine.memory_bytes, mine.emulation.amp_pace) == (None, None, {})
    for pace in (None, {"T4": 1}):
        with pytest.raises(hk.DeviceError, match=r"pace=\{'MyCard'"):
            hk.emulate("1xMyCard + 1xT4", pace=pace)
    with pytest.raises(hk.DeviceError, match="no speed is published for 'CPU'"):
        hk.emulate("1xA100 + 1xCPU")


def test_a_label_is_not_taken_for_a_name() -> None:
    fleet = hk.emulate("17xV100", dies_at={"V100 #16": 3})
    assert [d.emulation.dies_at_step for d in fleet] == [None] * 16 + [3]
    with pytest.raises(hk.DeviceError, match="V100-16"):
        hk.emulate("17xV100", dies_at={"V100-16": 3})


def test_memory() -> None:
    def sizes(memory: Any) -> list[int | None]:
        return [d.memory_bytes for d in hk.emulate("1xA100 + 1xV100", memory=memory)]

    assert sizes(None) == [40 * 2**30, 16 * 2**30]
    assert sizes("8GB") == [2**33, 2**33]
    assert sizes({"V100": "32GB"}) == [40 * 2**30, 2**35]
    device = hk.emulate("1xT4", memory=1000)[0]
    assert device.emulation.memory_bytes == device.memory_bytes == 1000


def test_links() -> None:
    how = hk.emulate("1xA100", link={"intra": "300GB/s", "inter": "2GB/s, 50us"})[0].emulation
    assert how.intra_link == hk.Link(bytes_per_s=300e9)
    assert how.inter_link.latency_s == pytest.approx(50e-6)
    assert hk.emulate("1xA100")[0].emulation.intra_link == hk.Link()


def test_amp_follows_amdahl_and_what_the_card_has() -> None:
    gain = 1 / (0.4 + 0.6 * 19.5 / 312)
    assert amp_pace(find_spec("A100"), 0.6) == pytest.approx({"bf16": gain, "fp16": gain})
    assert set(amp_pace(find_spec("V100"), 0.6)) == {"fp16"}
    assert set(amp_pace(find_spec("T4"), 0.6)) == {"fp16"}
    assert amp_pace(find_spec("1080 Ti"), 0.6) == {}
    assert amp_pace(find_spec("CPU"), 0.6) == {"bf16": 1.0}
    assert amp_pace(None, 0.6) == {}
    assert amp_pace(find_spec("A100"), 0) == {"bf16": 1.0, "fp16": 1.0}
    assert amp_pace(find_spec("A100"), 1)["bf16"] == pytest.approx(16)


def test_trouble_over_time() -> None:
    late, early = hk.SlowDown(at_s=9, factor=2), hk.SlowDown(at_s=4, factor=1.5)
    fleet = hk.emulate("2xV100", slow_down={"V100 #1": [late, early]}, dies_at={"V100 #0": 40})
    assert [d.emulation.slow_downs for d in fleet] == [(), (early, late)]
    assert [d.emulation.dies_at_step for d in fleet] == [40, None]
    assert hk.emulate("1xV100", slow_down={"V100": late})[0].emulation.slow_downs == (late,)


def test_each_device_has_a_seed_and_a_key_of_its_own() -> None:
    one, two = hk.emulate("3xT4", seed=7), hk.emulate("3xT4", seed=7)
    assert [d.emulation.seed for d in one] == [7, 8, 9]
    assert len({d.key for fleet in (one, two) for d in fleet}) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pace": {"A10": 2}}, "'A10'; the fleet has A100, V100, A100 #0, V100 #1"),
        ({"memory": {"A100 #1": "1GB"}}, "the fleet has"),
        ({"slow_down": {"B": hk.SlowDown(at_s=1, factor=2)}}, "slow_down"),
        ({"slow_down": {"A100": 2}}, "SlowDown"),
        ({"dies_at": {"A100": -1}}, "dies_at"),
        ({"dies_at": {"A100": 1.5}}, "dies_at"),
        ({"dies_at": 40}, "mapping"),
        ({"pace": 2}, "mapping"),
        ({"pace": {"A100": 0}}, "pace"),
        ({"pace": {"A100": "fast"}}, "pace"),
        ({"pace": {"A100": math.nan}}, "pace"),
        ({"memory": "much"}, "memory|number"),
        ({"link": {"infiniband": 1}}, "intra"),
        ({"sample_s": 0}, "sample_s"),
        ({"launch_s": -1}, "launch_s"),
        ({"time_scale": 0}, "time_scale"),
        ({"time_scale": "x"}, "time_scale"),
        ({"jitter": math.inf}, "jitter"),
        ({"seed": 1.5}, "seed"),
        ({"matmul_share": 1.1}, "matmul_share"),
        ({"matmul_share": None}, "matmul_share"),
    ],
)
def test_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(hk.DeviceError, match=words):
        hk.emulate("1xA100 + 1xV100", **arguments)


@given(st.lists(st.tuples(st.integers(1, 4), NAMES), min_size=1, max_size=5), st.data())
def test_round_trip(terms: list[tuple[int, str]], data: st.DataObject) -> None:
    signs = st.sampled_from(["x", "×", "*", " x ", " X"])
    spec = " + ".join(f"{count}{data.draw(signs)}{name}" for count, name in terms)
    assert parse_terms(spec) == tuple(terms)
    fleet = hk.emulate(spec)
    assert [d.name for d in fleet] == [name for count, name in terms for _ in range(count)]
    assert min(d.emulation.pace for d in fleet) == 1.0


@given(st.one_of(st.text(max_size=30), st.text(alphabet="0123456789xX×*+ A10V#-", max_size=16)))
def test_junk_is_refused_with_a_device_error(spec: str) -> None:
    try:
        fleet = hk.emulate(spec)
    except hk.DeviceError:
        return
    assert 1 <= len(fleet) <= MOST_DEVICES
