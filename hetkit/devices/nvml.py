"""Readings of NVIDIA cards through NVML: no CUDA context, no PyTorch, safe in the kernel.

NVML numbers all cards of the machine; CUDA numbers those that it may see. With
``CUDA_DEVICE_ORDER=PCI_BUS_ID`` CUDA's order is by PCI address, and ``CUDA_VISIBLE_DEVICES`` picks
from it, by number or by UUID. CUDA's own default order is "fastest first", which on unlike cards
cannot be told from here: `order_is_certain` says whether that matters.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One NVIDIA card as NVML lists it. What the driver does not tell is None.

    Args:
        nvml_index: NVML's number of it.
        ordinal: CUDA's number of it; None when CUDA does not see it.
        name: Such as ``"NVIDIA GeForce RTX 3090"``.
        uuid: Such as ``"GPU-8932f937-…"``.
        pci_address: Such as ``"00000000:3B:00.0"``.
        problem: Why it cannot be used, in NVML's words; empty when it can.
    """

    nvml_index: int
    ordinal: int | None = None
    name: str | None = None
    uuid: str | None = None
    pci_address: str | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a card says of itself at one moment. A reading that failed is None.

    Args:
        card: Whose reading it is.
        capability: Compute capability, such as ``"8.6"``.
        memory_total_bytes, memory_used_bytes: Of the whole card, by all processes.
        utilisation: Share of the last sample period in which a kernel ran, 0 to 1.
        power_w, power_limit_w: Drawn now, and the limit that is set.
        temperature_c: Of the chip.
    """

    card: Card
    capability: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilisation: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


class Nvml:
    """An open NVML, or the reason why there is none.

    Example:
        >>> from hetkit.devices.nvml import Nvml
        >>> with Nvml() as nvml:
        ...     readings = [nvml.read(card) for card in nvml.list_cards()]
        >>> bool(readings) or isinstance(nvml.reason, str)
        True
    """

    def __init__(self) -> None:
        self._library: ModuleType | None = None
        self.reason = "NVML is not open: use it as a context manager"
        """Why there is no NVML; empty when it could be opened."""

    def __enter__(self) -> "Nvml":
        try:
            import pynvml
        except ImportError as error:
            self.reason = f"the package nvidia-ml-py is not installed ({error})"
            return self
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.reason = f"no NVIDIA driver answers ({error})"
            return self
        self._library, self.reason = pynvml, ""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        library, self._library = self._library, None
        if library is not None:
            try:
                library.nvmlShutdown()
            except library.NVMLError as shutdown_error:
                _log.debug("nvmlShutdown: %s", shutdown_error)

    @property
    def driver(self) -> str | None:
        """Version of the driver, such as ``"550.54.15"``."""
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def list_cards(self) -> tuple[Card, ...]:
        """Returns every card in PCI order; empty when there is no driver.

        A card that does not answer is listed with its `problem`, and hides no other.
        """
        count = self._ask("nvmlDeviceGetCount") or 0
        cards = sorted((self._card(index) for index in range(count)), key=_pci_order)
        healthy = [card.uuid for card in cards if not card.problem]
        ordinals = visible_ordinals(healthy, os.environ.get("CUDA_VISIBLE_DEVICES"))
        places = iter(ordinals)
        return tuple(c if c.problem else replace(c, ordinal=next(places)) for c in cards)

    def read(self, card: Card) -> Reading:
        """Reads a card; what it does not answer is None."""
        handle = self._ask("nvmlDeviceGetHandleByIndex", card.nvml_index)
        if handle is None:
            return Reading(card=card)
        ask = self._ask
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        return Reading(
            card=card,
            capability=None if capability is None else ".".join(map(str, capability)),
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_used_bytes=None if memory is None else int(memory.used),
            utilisation=None if rates is None else rates.gpu / 100,
            power_w=_thousandths(ask("nvmlDeviceGetPowerUsage", handle)),
            power_limit_w=_thousandths(ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
            temperature_c=ask("nvmlDeviceGetTemperature", handle, 0),
        )

    def _card(self, index: int) -> Card:
        problem: list[str] = []
        handle = self._ask("nvmlDeviceGetHandleByIndex", index, refused=problem.append)
        if handle is None:
            return Card(nvml_index=index, problem=problem[0] if problem else "it does not answer")
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        return Card(
            nvml_index=index,
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            pci_address=None if pci is None else _text(pci.busId),
        )

    def _ask(self, function: str, *args: Any, refused: Callable[[str], None] | None = None) -> Any:
        """Calls one NVML function; None when it fails, and the reason goes to ``refused``."""
        library = self._library
        if library is None:
            return None
        try:
            return getattr(library, function)(*args)
        except library.NVMLError as error:
            _log.debug("%s%r: %s", function, args[1:], error)
            if refused is not None:
                refused(str(error))
            return None


def visible_ordinals(uuids: Sequence[str | None], visible: str | None) -> tuple[int | None, ...]:
    """Returns CUDA's number of each card, or None where CUDA does not see it.

    CUDA reads the list up to the first entry that names no card, and sees nothing at all when a
    card comes twice (CUDA programming guide, "CUDA environment variables").

    Args:
        uuids: The cards' UUIDs in CUDA's own order.
        visible: The value of ``CUDA_VISIBLE_DEVICES``; None when it is not set.

    Example:
        >>> from hetkit.devices.nvml import visible_ordinals
        >>> visible_ordinals(["GPU-a1", "GPU-b2", "GPU-c3"], "2,GPU-a")
        (1, None, 0)
    """
    if visible is None:
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for entry in visible.split(","):
        place = _place(entry.strip(), uuids)
        if place is None:
            break
        chosen.append(place)
    if len(set(chosen)) < len(chosen):
        chosen = []
    return tuple(chosen.index(i) if i in chosen else None for i in range(len(uuids)))


def order_is_certain(cards: Sequence[Card], environ: Mapping[str, str]) -> bool:
    """Whether CUDA's numbers are sure to be those of `Nvml.list_cards`.

    They are when CUDA orders by PCI address, or when all cards are of one model.
    """
    models = {card.name for card in cards if not card.problem}
    return len(models) <= 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _place(entry: str, uuids: Sequence[str | None]) -> int | None:
    if re.fullmatch(r"[0-9]{1,4}", entry):
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _pci_order(card: Card) -> tuple[bool, str, int]:
    return card.pci_address is None, (card.pci_address or "").upper(), card.nvml_index


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return None if value is None else str(value)


def _thousandths(value: int | None) -> float | None:
    return None if value is None else value / 1000
