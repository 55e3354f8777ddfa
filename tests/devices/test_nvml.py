import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.devices.nvml import Card, Nvml, Reading, order_is_certain, visible_ordinals


def readings() -> list[Reading]:
    with Nvml() as nvml:
        return [nvml.read(card) for card in nvml.list_cards()]


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Nvml() as nvml:
        assert nvml.list_cards() == ()
        assert nvml.driver is None
    assert "nvidia-ml-py is not installed" in nvml.reason


def test_no_driver(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(driver=False)
    with Nvml() as nvml:
        assert nvml.list_cards() == ()
        assert nvml.read(Card(nvml_index=0)) == Reading(card=Card(nvml_index=0))
    assert nvml.reason == "no NVIDIA driver answers (Driver Not Loaded)"


def test_no_card(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml()
    with Nvml() as nvml:
        assert (nvml.list_cards(), nvml.reason, nvml.driver) == ((), "", "550.54.15")


def test_one_card(fake_nvml: Callable[..., Any], make_card: Callable[..., Any]) -> None:
    library = fake_nvml(make_card())
    (reading,) = readings()
    assert reading == Reading(
        card=Card(
            nvml_index=0,
            ordinal=0,
            name="NVIDIA GeForce RTX 3090",
            uuid="GPU-0",
            pci_address="00000000:01:00.0",
        ),
        capability="8.6",
        memory_total_bytes=24 * 2**30,
        memory_used_bytes=2**30,
        utilisation=0.37,
        power_w=123.4,
        power_limit_w=350.0,
        temperature_c=61,
    )
    assert library.open == 0


def test_cards_come_in_pci_order(fake_nvml: Callable[..., Any], unlike_cards: list[Any]) -> None:
    fake_nvml(*unlike_cards)
    with Nvml() as nvml:
        first, second = nvml.list_cards()
    assert (first.uuid, first.nvml_index, first.ordinal) == ("GPU-bb", 1, 0)
    assert (second.uuid, second.nvml_index, second.ordinal) == ("GPU-aa", 0, 1)
    assert first.name == "NVIDIA GeForce GTX 1080 Ti"


def test_a_lost_card_hides_no_other(
    fake_nvml: Callable[..., Any], make_card: Callable[..., Any]
) -> None:
    fake_nvml(
        make_card(uuid="GPU-0", bus="0000:01"),
        make_card(uuid="GPU-1", bus="0000:02", fails=frozenset({"all"})),
        make_card(uuid="GPU-2", bus="0000:03"),
    )
    found = readings()
    assert [reading.card.uuid for reading in found] == ["GPU-0", "GPU-2", None]
    assert [reading.card.ordinal for reading in found] == [0, 1, None]
    lost = found[-1]
    assert (lost.card.nvml_index, lost.power_w, lost.memory_used_bytes) == (1, None, None)
    assert "GPU is lost" in lost.card.problem


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("CudaComputeCapability", ["capability"]),
        ("MemoryInfo", ["memory_total_bytes", "memory_used_bytes"]),
        ("UtilizationRates", ["utilisation"]),
        ("PowerUsage", ["power_w"]),
        ("EnforcedPowerLimit", ["power_limit_w"]),
        ("Temperature", ["temperature_c"]),
    ],
)
def test_a_reading_that_fails_is_none_and_the_others_are_there(
    function: str,
    fields: list[str],
    fake_nvml: Callable[..., Any],
    make_card: Callable[..., Any],
) -> None:
    fake_nvml(make_card(fails=frozenset({function})))
    (reading,) = readings()
    missing = [name for name in Reading.__slots__ if getattr(reading, name) is None]
    assert missing == fields


def test_cards_hidden_from_cuda_have_no_ordinal(
    fake_nvml: Callable[..., Any], unlike_cards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(*unlike_cards)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    assert [reading.card.ordinal for reading in readings()] == [None, 0]


@pytest.mark.parametrize(
    ("visible", "ordinals"),
    [
        (None, (0, 1, 2)),
        ("", (None, None, None)),
        ("-1", (None, None, None)),
        ("0", (0, None, None)),
        ("2,0", (1, None, 0)),
        (" 1 , 2 ", (None, 0, 1)),
        ("0,7,1", (0, None, None)),
        ("0,-1,1", (0, None, None)),
        ("1,1", (None, None, None)),
        ("GPU-b2,GPU-a1", (1, 0, None)),
        ("GPU-c", (None, None, 0)),
        ("GPU-", (None, None, None)),
        ("gpu-a1", (None, None, None)),
        ("GPU-a1,0", (None, None, None)),
        ("²", (None, None, None)),
    ],
)
def test_cuda_visible_devices(visible: str | None, ordinals: tuple[int | None, ...]) -> None:
    assert visible_ordinals(["GPU-a1", "GPU-b2", "GPU-c3"], visible) == ordinals


@given(st.integers(0, 5), st.one_of(st.none(), st.text(max_size=12)))
def test_ordinals_count_from_0_without_gaps(count: int, visible: str | None) -> None:
    ordinals = visible_ordinals([f"GPU-{i}" for i in range(count)], visible)
    seen = sorted(ordinal for ordinal in ordinals if ordinal is not None)
    assert len(ordinals) == count
    assert seen == list(range(len(seen)))


def test_the_order_is_certain_for_like_cards_or_by_pci() -> None:
    like = [Card(nvml_index=i, name="T4") for i in range(2)]
    unlike = [*like, Card(nvml_index=2, name="A10")]
    assert order_is_certain(like, {})
    assert order_is_certain([*like, Card(nvml_index=2, problem="lost")], {})
    assert not order_is_certain(unlike, {})
    assert not order_is_certain(unlike, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert order_is_certain(unlike, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
