"""Fleet: the devices of a session, and the ways to name them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from hetkit.devices.device import Device, Link, SlowDown
from hetkit.devices.emulated import build_devices, make_places, parse_terms
from hetkit.devices.named import ALLOWED, named_devices
from hetkit.devices.table import html_table, text_table
from hetkit.devices.units import at_least_0, positive, show_memory, show_rate
from hetkit.errors import DeviceError

_EMULATED_HEADER = ("device", "host", "figures", "pace", "memory", "AMP", "in host", "between")
_REAL_HEADER = ("device", "runs on", "memory", "known as")


@dataclass(frozen=True)
class Fleet(Sequence[Device]):
    """The devices of a session, in rank order.

    Args:
        devices: One device per rank; all real or all emulated, since their clocks do not mix.

    Raises:
        DeviceError: There is none, one comes twice, or real and emulated are mixed.

    Example:
        >>> import hetkit as hk
        >>> fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.3})
        >>> fleet.labels, fleet.emulated
        (('A100 #0', 'V100 #1'), True)
    """

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise DeviceError(f"a fleet needs at least one device; allowed are {ALLOWED}.")
        if len({device.emulated for device in self.devices}) > 1:
            raise DeviceError(
                "real and emulated devices cannot train together, their clocks differ: "
                "use one kind only."
            )
        for what in ("key", "label"):
            counts = Counter(getattr(device, what) for device in self.devices)
            value, count = counts.most_common(1)[0]
            if count > 1:
                raise DeviceError(f"the device {value!r} is given {count} times: name it once.")

    @property
    def labels(self) -> tuple[str, ...]:
        """The devices' short names, in rank order."""
        return tuple(device.label for device in self.devices)

    @property
    def emulated(self) -> bool:
        """Whether the devices are emulated."""
        return self.devices[0].emulated

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    @overload
    def __getitem__(self, index: int) -> Device: ...
    @overload
    def __getitem__(self, index: slice) -> "Fleet": ...
    def __getitem__(self, index: int | slice) -> "Device | Fleet":
        if isinstance(index, slice):
            return Fleet(self.devices[index])
        return self.devices[index]

    def __repr__(self) -> str:
        return f"{self._title}\n{text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return html_table(*self._table(), caption=self._title)

    @property
    def _title(self) -> str:
        noun = "device" if len(self) == 1 else "devices"
        return f"Fleet of {len(self)} {noun}" + (", emulated" if self.emulated else "")

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        if self.emulated:
            return _EMULATED_HEADER, [_emulated_row(device) for device in self.devices]
        return _REAL_HEADER, [_real_row(device) for device in self.devices]


def parse_fleet(devices: object) -> Fleet:
    """Returns the fleet that a person means.

    Args:
        devices: ``"auto"`` (every real CUDA device that this process may use; where there is none,
            one ``"cpu"``), ``"cpu"``, ``"cpu*2"`` (two ranks on the CPU), ``"cuda"`` (all),
            ``"cuda:0, cuda:1"`` or ``"cuda:0 + cpu*2"``, ``"inline"`` (one rank in this very
            process), a `Device`, a `Fleet`, or a list of these.

    Returns:
        The fleet. CPU devices share the host's memory evenly.

    Raises:
        DeviceError: No such device, the same one twice, none at all, or a wrong count.

    Example:
        >>> from hetkit.devices.fleet import parse_fleet
        >>> parse_fleet("cpu*2").labels
        ('cpu #0', 'cpu #1')
    """
    if isinstance(devices, Fleet):
        return devices
    return Fleet(named_devices(devices))


def emulate(
    spec: str,
    *,
    pace: Mapping[str, float] | None = None,
    memory: object = None,
    link: object = None,
    sample_s: float | None = None,
    launch_s: float = 0.0,
    time_scale: float = 1.0,
    jitter: float = 0.0,
    seed: int = 0,
    slow_down: Mapping[str, SlowDown | Sequence[SlowDown]] | None = None,
    dies_at: Mapping[str, int] | None = None,
    matmul_share: float = 0.6,
) -> Fleet:
    """Returns a fleet of emulated devices: real processes and real gradients, on emulated clocks.

    Mappings are keyed by a name (``"V100"``, all of them) or a label (``"V100 #1"``, that one; the
    number is the place in the fleet). A label wins over a name.

    Args:
        spec: Such as ``"2xA100 + 4xV100"`` (also ``×`` and ``*``). Each term is one host.
        pace: Relative speeds; a name that is left out has 1. None (default): from the catalogue,
            the geometric mean of the ratios of FP32 peak and memory bandwidth, slowest at 1.
        memory: Size of memory, one for all or a mapping; bytes or ``"16GB"``, which is 16·2³⁰
            bytes as on a card's box. Default: the catalogue's; a card of your own: unlimited.
        link: ``"2GB/s"`` (10⁹ bytes/s in each direction), ``"2GB/s, 50us"`` with a latency, bytes
            per second, an `hk.Link`, or ``{"intra": …, "inter": …}`` for the links within a host
            and between hosts. Default: no latency and no limit.
        sample_s: Seconds of compute per sample at pace 1. None (default): calibrated from the
            task's real compute when the workers start.
        launch_s: Fixed seconds per micro-batch.
        time_scale: Wall seconds per device second.
        jitter: Relative standard deviation of each step's compute time.
        seed: Of the jitter; each device gets ``seed`` plus its place.
        slow_down: `hk.SlowDown`, or a list of them: changes of pace over time.
        dies_at: The step at which the device's worker kills itself.
        matmul_share: Share of float32 compute time spent in matrix products, 0 to 1, from which
            AMP's gain follows by Amdahl's law. Default 0.6, a round figure: measure your model's.

    Raises:
        DeviceError: An argument is out of its range, a mapping names no device of the fleet, or
            neither ``pace`` nor the catalogue has a device's speed.

    Example:
        >>> import hetkit as hk
        >>> fleet = hk.emulate("2xA100 + 4xV100", pace={"A100": 2.3}, link="2GB/s, 50us")
        >>> [device.emulation.pace for device in fleet]
        [2.3, 2.3, 1.0, 1.0, 1.0, 1.0]
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DeviceError(f"seed must be an int, not {seed!r}.")
    common = {
        "sample_s": None if sample_s is None else positive(sample_s, name="sample_s"),
        "launch_s": at_least_0(launch_s, name="launch_s"),
        "time_scale": positive(time_scale, name="time_scale"),
        "jitter": at_least_0(jitter, name="jitter"),
    }
    built = build_devices(
        make_places(parse_terms(spec)),
        pace=pace,
        memory=memory,
        link=link,
        slow_down=slow_down,
        dies_at=dies_at,
        matmul_share=matmul_share,
        seed=seed,
        common=common,
    )
    return Fleet(built)


def _emulated_row(device: Device) -> tuple[str, ...]:
    how = device.emulation
    if how is None:
        return (device.label, device.host, "real", "–", "–", "–", "–", "–")
    amp = ", ".join(f"{name} ×{gain:.2f}" for name, gain in how.amp_pace.items())
    links = (_show_link(how.intra_link), _show_link(how.inter_link))
    memory = show_memory(device.memory_bytes)
    return (device.label, device.host, "emulated", f"{how.pace:.2f}×", memory, amp or "–", *links)


def _real_row(device: Device) -> tuple[str, ...]:
    known = device.spec.name if device.spec else "–"
    return (device.label, device.torch_device, show_memory(device.memory_bytes), known)


def _show_link(link: Link) -> str:
    latency = f", {link.latency_s * 1e6:.3g} µs" if link.latency_s else ""
    return show_rate(link.bytes_per_s) + latency
