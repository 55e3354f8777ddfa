"""Real CUDA devices of this process, found through NVML; PyTorch is not imported for it."""

import logging

from hetkit.devices.catalog import known_spec
from hetkit.devices.device import Device
from hetkit.devices.host import torch_build
from hetkit.devices.nvml import Nvml, Reading

_log = logging.getLogger(__name__)


def cuda_devices() -> tuple[Device, ...]:
    """Returns the CUDA devices that this process may use, by ordinal.

    None where the installed PyTorch cannot use them; a warning in the log says so.

    Example:
        >>> from hetkit.devices.real import cuda_devices
        >>> all(device.kind == "cuda" for device in cuda_devices())
        True
    """
    with Nvml() as nvml:
        readings = [nvml.read(card) for card in nvml.list_cards() if card.ordinal is not None]
    if not readings:
        return ()
    build = torch_build()
    if build is None or build.cuda is None:
        _log.warning("%d NVIDIA cards are left alone: %s.", len(readings), why_no_cuda())
        return ()
    return tuple(sorted(map(as_device, readings), key=lambda device: device.index))


def as_device(reading: Reading) -> Device:
    """Returns the device that stands for a card which CUDA sees."""
    card = reading.card
    if card.ordinal is None:
        raise ValueError(f"CUDA does not see NVML's card {card.nvml_index}")
    name = card.name or "NVIDIA card"
    return Device(
        name=name,
        kind="cuda",
        index=card.ordinal,
        key=f"cuda:{card.uuid or card.pci_address or card.nvml_index}",
        uuid=card.uuid,
        spec=known_spec(name),
        memory_bytes=reading.memory_total_bytes,
    )


def why_no_cuda() -> str:
    """Returns why this process has no CUDA device, for the middle of a sentence."""
    with Nvml() as nvml:
        cards = nvml.list_cards()
    if nvml.reason:
        return nvml.reason
    if not cards:
        return "the driver lists no card"
    build = torch_build()
    if build is None:
        return "PyTorch is not installed"
    if build.cuda is None:
        return f"the installed PyTorch {build.version} is built without CUDA"
    return "CUDA_VISIBLE_DEVICES hides every card"
