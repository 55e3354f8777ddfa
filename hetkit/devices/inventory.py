"""Inventory: what this machine has, what stands in the way, and how to mend it."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from hetkit.devices.catalog import known_spec
from hetkit.devices.host import Host, TorchBuild, read_host, torch_build
from hetkit.devices.nvml import Card, Nvml, Reading, order_is_certain
from hetkit.devices.table import html_table, text_table
from hetkit.devices.units import show_memory

_SMALL_SHM_BYTES = 2**30
"""Docker gives 64 MiB of /dev/shm by default; loader processes pass batches through it."""

_HEADER = ("device", "name", "memory", "in use", "busy", "power", "°C", "capability", "AMP")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that a person should know about this machine, and what to do about it."""

    text: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What this machine has; shows as a table, as text and in a notebook.

    Args:
        readings: One per NVIDIA card, also of those that CUDA does not see.
        host: Cores and memory that this process may use.
        findings: What stands in the way, with remedies.
        driver: Version of the NVIDIA driver; None without one.
        torch: What PyTorch was built for; None where it is not installed.

    Example:
        >>> import hetkit as hk
        >>> hk.devices().host.cores >= 1
        True
    """

    readings: tuple[Reading, ...]
    host: Host
    findings: tuple[Finding, ...]
    driver: str | None = None
    torch: TorchBuild | None = None

    def __str__(self) -> str:
        lines = [self._title, text_table(_HEADER, self._rows())]
        lines += [f"! {finding.text}\n  → {finding.remedy}" for finding in self.findings]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li>{escape(finding.text)}<br>→ {escape(finding.remedy)}</li>"
            for finding in self.findings
        )
        notes = f"<ul>{items}</ul>" if items else ""
        return html_table(_HEADER, self._rows(), caption=self._title) + notes

    @property
    def _title(self) -> str:
        driver = f"NVIDIA driver {self.driver}" if self.driver else "no NVIDIA driver"
        version = f"PyTorch {self.torch.version}" if self.torch else "no PyTorch"
        return f"{self.host.usable_cores:g} CPU cores, {driver}, {version}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [_cpu_row(self.host), *(_card_row(reading) for reading in self.readings)]


def devices() -> Inventory:
    """Looks at this machine through NVML and the file system; CUDA and PyTorch stay untouched.

    Returns:
        The cards and the host, with findings and remedies.
    """
    with Nvml() as nvml:
        readings = tuple(nvml.read(card) for card in nvml.list_cards())
        driver = nvml.driver
    host, build = read_host(), torch_build()
    cards = tuple(reading.card for reading in readings)
    found = (
        *card_findings(cards, nvml.reason, build, os.environ),
        *host_findings(host, ranks=sum(card.ordinal is not None for card in cards)),
    )
    return Inventory(readings=readings, host=host, findings=found, driver=driver, torch=build)


def card_findings(
    cards: tuple[Card, ...], reason: str, build: TorchBuild | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields what stands between this process and its cards.

    Args:
        cards: As NVML lists them.
        reason: Why there is no NVML; empty when there is.
        build: What PyTorch was built for.
        environ: The environment, for CUDA's variables.
    """
    if not cards:
        yield Finding(
            text=f"No NVIDIA card: {reason or 'the driver lists none'}.",
            remedy='Train on devices="cpu*2", or on hk.emulate("1xA100 + 1xV100").',
        )
        return
    if build is None or build.cuda is None:
        what = f"PyTorch {build.version} is" if build else "No PyTorch is installed, so none is"
        yield Finding(
            text=f"{what} built for CUDA: it cannot use the cards.",
            remedy="Install a CUDA build; see https://pytorch.org/get-started/locally.",
        )
    for card in cards:
        if card.problem:
            yield Finding(
                text=f"NVML's card {card.nvml_index} does not answer: {card.problem}.",
                remedy="See `nvidia-smi` and `dmesg`; a lost card needs a reset or a reboot.",
            )
    hidden = [card for card in cards if card.ordinal is None and not card.problem]
    if hidden:
        yield Finding(
            text=f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r} hides "
            f"{len(hidden)} of {len(cards)} cards.",
            remedy="Change it before the kernel starts to use them.",
        )
    if not order_is_certain(cards, environ):
        yield Finding(
            text="CUDA numbers unlike cards by speed, so its numbers may differ from these.",
            remedy="Set CUDA_DEVICE_ORDER=PCI_BUS_ID before the kernel starts.",
        )


def host_findings(host: Host, *, ranks: int) -> Iterator[Finding]:
    """Yields what the host lacks for ``ranks`` CUDA ranks."""
    if ranks and host.usable_cores < 2 * ranks:
        yield Finding(
            text=f"{host.usable_cores:g} CPU cores for {ranks} cards: each rank wants two, one "
            f"to launch kernels and one to load data.",
            remedy="Ask for more cores, or keep Task(num_workers=0).",
        )
    if host.shm_bytes is not None and host.shm_bytes < _SMALL_SHM_BYTES:
        yield Finding(
            text=f"/dev/shm has only {show_memory(host.shm_bytes)}: DataLoader processes, which "
            f"pass batches through it, may die of a bus error.",
            remedy="Start the container with --shm-size=8g or --ipc=host, or keep "
            "Task(num_workers=0).",
        )


def _cpu_row(host: Host) -> tuple[str, ...]:
    total, used = show_memory(host.usable_bytes), show_memory(host.used_bytes)
    return ("cpu", "CPU", total, used, "–", "–", "–", "–", "bf16")


def _card_row(reading: Reading) -> tuple[str, ...]:
    card = reading.card
    spec = known_spec(card.name or "")
    return (
        "–" if card.ordinal is None else f"cuda:{card.ordinal}",
        card.name or "–",
        show_memory(reading.memory_total_bytes),
        show_memory(reading.memory_used_bytes),
        "–" if reading.utilisation is None else f"{reading.utilisation:.0%}",
        _power(reading),
        "–" if reading.temperature_c is None else f"{reading.temperature_c:g}",
        reading.capability or (spec.architecture if spec else "–"),
        _amp(reading.capability),
    )


def _power(reading: Reading) -> str:
    if reading.power_w is None:
        return "–"
    limit = "" if reading.power_limit_w is None else f" of {reading.power_limit_w:.0f}"
    return f"{reading.power_w:.0f}{limit} W"


def _amp(capability: str | None) -> str:
    """Returns the precisions that pay off: bf16 from capability 8.0, fp16 from 7.0."""
    if capability is None:
        return "–"
    major = int(capability.split(".")[0])
    return "bf16, fp16" if major >= 8 else "fp16" if major >= 7 else "–"
