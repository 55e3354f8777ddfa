"""A driver that is not there: stands for the module pynvml in these tests."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hetkit.devices import real
from hetkit.devices.host import TorchBuild


@dataclass
class FakeCard:
    """One card; the functions named in ``fails`` refuse to answer for it."""

    name: str | bytes = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-0"
    bus: str | bytes = "00000000:01:00.0"
    capability: tuple[int, int] = (8, 6)
    total_bytes: int = 24 * 2**30
    used_bytes: int = 2**30
    fails: frozenset[str] = field(default_factory=frozenset)


class FakeNvml(ModuleType):
    """The part of pynvml that hetkit calls, over a list of `FakeCard`; None: no driver."""

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, cards: list[FakeCard] | None) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.open = 0

    def nvmlInit(self) -> None:
        if self.cards is None:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlDeviceGetCount(self) -> int:
        assert self.cards is not None
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        assert self.cards is not None
        return self._answer("HandleByIndex", self.cards[index], self.cards[index])

    def nvmlDeviceGetName(self, card: FakeCard) -> Any:
        return self._answer("Name", card, card.name)

    def nvmlDeviceGetUUID(self, card: FakeCard) -> Any:
        return self._answer("UUID", card, card.uuid)

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> Any:
        return self._answer("PciInfo", card, SimpleNamespace(busId=card.bus))

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> Any:
        return self._answer("CudaComputeCapability", card, card.capability)

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        memory = SimpleNamespace(total=card.total_bytes, used=card.used_bytes)
        return self._answer("MemoryInfo", card, memory)

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        return self._answer("UtilizationRates", card, SimpleNamespace(gpu=37, memory=12))

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> Any:
        return self._answer("PowerUsage", card, 123_400)

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> Any:
        return self._answer("EnforcedPowerLimit", card, 350_000)

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> Any:
        assert sensor == 0
        return self._answer("Temperature", card, 61)

    def _answer(self, function: str, card: FakeCard, value: Any) -> Any:
        if function in card.fails or "all" in card.fails:
            raise self.NVMLError(f"GPU is lost ({function})")
        return value


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Returns a function that puts a driver with the given cards (or None) in place."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def install(*cards: FakeCard, driver: bool = True) -> FakeNvml:
        library = FakeNvml(list(cards) if driver else None)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return install


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes PyTorch look as if it was built for CUDA."""
    monkeypatch.setattr(real, "torch_build", lambda: TorchBuild(version="2.13.0", cuda="12.6"))


@pytest.fixture
def unlike_cards() -> list[FakeCard]:
    """Two unlike cards, which NVML lists against the PCI order."""
    return [
        FakeCard(uuid="GPU-aa", bus="00000000:81:00.0"),
        FakeCard(
            name=b"NVIDIA GeForce GTX 1080 Ti",
            uuid="GPU-bb",
            bus=b"00000000:01:00.0",
            capability=(6, 1),
            total_bytes=11 * 2**30,
        ),
    ]


@pytest.fixture
def make_card() -> type[FakeCard]:
    """`FakeCard`, for tests that want cards of their own."""
    return FakeCard
