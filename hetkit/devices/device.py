"""Device: one thing that runs one rank, real or emulated. Frozen data, safe to send to a worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetkit.errors import DeviceError


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _above_0(name: str, value: float) -> None:
    if not _is_number(value) or not value > 0:
        raise DeviceError(f"{name} must be a number above 0, not {value!r}.")


def _at_least_0(name: str, value: float) -> None:
    if not _is_number(value) or not value >= 0:
        raise DeviceError(f"{name} must be a number of at least 0, not {value!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """Published figures of one kind of device. A figure that nobody published is None.

    Args:
        name: The catalogue's name, such as ``"V100-SXM2-16"``.
        vendor: ``"nvidia"``, ``"amd"`` or ``"cpu"``.
        architecture: CUDA compute capability (``"7.0"``) or AMD target (``"gfx90a"``).
        memory_bytes: Size of its memory.
        memory_bytes_per_s: Bandwidth of its memory.
        fp32_flops, tf32_flops, fp16_flops, bf16_flops: Dense peak, in operations per second;
            None where the device has no such mode.
        link_bytes_per_s: Its fastest link, both directions summed.
        link: The link's name, such as ``"NVLink3"``.
        power_w: Its power limit.
        sources: Field name to where the figure was read; the key ``"*"`` stands for the rest.
    """

    name: str
    vendor: str
    architecture: str = ""
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    fp32_flops: float | None = None
    tf32_flops: float | None = None
    fp16_flops: float | None = None
    bf16_flops: float | None = None
    link_bytes_per_s: float | None = None
    link: str = ""
    power_w: float | None = None
    sources: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link between devices: time = latency + bytes / rate.

    Args:
        latency_s: Seconds before the first byte arrives. Default 0.
        bytes_per_s: Rate of one direction. Default: infinite.

    Raises:
        DeviceError: A figure is not a number, or out of its range.

    Example:
        >>> import hetkit as hk
        >>> hk.Link(bytes_per_s=2e9).latency_s
        0.0
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        _at_least_0("latency_s", self.latency_s)
        _above_0("bytes_per_s", self.bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowDown:
    """From ``at_s`` seconds of training on, the device computes ``factor`` times slower.

    Args:
        at_s: Seconds since the worker's first step (a card that heats up, say).
        factor: Above 1 is slower, below 1 faster.

    Raises:
        DeviceError: A figure is not a number, or out of its range.

    Example:
        >>> import hetkit as hk
        >>> hk.emulate("1xV100", slow_down={"V100": hk.SlowDown(at_s=60, factor=1.5)}).labels
        ('V100 #0',)
    """

    at_s: float
    factor: float

    def __post_init__(self) -> None:
        _at_least_0("at_s", self.at_s)
        _above_0("factor", self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """How an emulated device behaves. Times are the device's own; wall time is × ``time_scale``.

    Args:
        pace: Speed relative to pace 1. Default 1.
        sample_s: Seconds of compute per sample at pace 1, forward and backward, at precision
            ``"off"``. None (default): calibrated when the workers start, from the task's real
            compute on this machine, so that the real compute stays well below it.
        launch_s: Fixed seconds per micro-batch, whatever the pace (the *a* of a + c·b).
        amp_pace: Precision to how many times faster than ``"off"`` it computes; a precision that
            is missing is one that the device does not have.
        intra_link, inter_link: Link to devices of the same host, and of other hosts.
        memory_bytes: Size of the device's memory; None: unlimited.
        fixed_bytes, sample_bytes: The p and q of p + q·μ; None: measured from the task.
        time_scale: Wall seconds per device second, for compute and links alike.
        jitter: Relative standard deviation of each step's compute time.
        seed: Seed of the jitter.
        slow_downs: Changes of pace over time, in order.
        dies_at_step: The step at which the worker kills itself; None: never.
    """

    pace: float = 1.0
    sample_s: float | None = None
    launch_s: float = 0.0
    amp_pace: dict[str, float] = field(default_factory=dict, hash=False)
    intra_link: Link = Link()
    inter_link: Link = Link()
    memory_bytes: int | None = None
    fixed_bytes: int | None = None
    sample_bytes: float | None = None
    time_scale: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    slow_downs: tuple[SlowDown, ...] = ()
    dies_at_step: int | None = None

    def __post_init__(self) -> None:
        _above_0("pace", self.pace)
        _above_0("time_scale", self.time_scale)
        _at_least_0("launch_s", self.launch_s)
        _at_least_0("jitter", self.jitter)
        if self.sample_s is not None:
            _above_0("sample_s", self.sample_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One thing that runs one rank.

    Args:
        name: What a person calls it: ``"A100"``, ``"NVIDIA GeForce RTX 3090"``, ``"cpu"``.
        kind: ``"cpu"`` or ``"cuda"`` (ROCm's PyTorch uses the latter name too): where tensors
            live. An emulated device computes on the ``"cpu"``.
        index: Ordinal among its kind; of an emulated device, its place in the fleet.
        key: What tells it from all others on this machine; two sessions never share one.
        uuid: The vendor's identifier, where there is one.
        host: Name of its host; equal names share the fast link.
        spec: Published figures, where they are known.
        memory_bytes: Size of its memory, where it is known.
        emulation: How it behaves when it is emulated; None for a real device.

    Example:
        >>> import hetkit as hk
        >>> [device.label for device in hk.emulate("1xA100 + 1xV100")]
        ['A100 #0', 'V100 #1']
    """

    name: str
    kind: str
    index: int
    key: str
    uuid: str | None = None
    host: str = "localhost"
    spec: DeviceSpec | None = None
    memory_bytes: int | None = None
    emulation: Emulation | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise DeviceError(f"kind must be 'cpu' or 'cuda', not {self.kind!r}.")

    def with_figures(self, figures: Mapping[str, Any]) -> "Device":
        """Returns the device with the figures that its emulation left open.

        Args:
            figures: ``sample_s``, ``fixed_bytes`` and ``sample_bytes``, as they were measured.
        """
        if self.emulation is None:
            return self
        missing = {
            name: value for name, value in figures.items() if getattr(self.emulation, name) is None
        }
        return replace(self, emulation=replace(self.emulation, **missing))

    @property
    def emulated(self) -> bool:
        """Whether its speed, memory and links are emulated."""
        return self.emulation is not None

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions of the forward that it computes in, best first, after ``"off"``.

        bf16 needs compute capability 8.0 (``torch.cuda.is_bf16_supported()`` also answers True
        for emulation); a CUDA device of unknown capability is trusted with fp16 only.
        """
        if self.emulation is not None:
            return tuple(mode for mode in ("bf16", "fp16") if mode in self.emulation.amp_pace)
        if self.kind == "cpu":
            return ("bf16", "fp16")
        architecture = self.spec.architecture if self.spec else ""
        modern = architecture.startswith("gfx9") or _capability(architecture) >= (8, 0)
        return ("bf16", "fp16") if modern else ("fp16",)

    @property
    def label(self) -> str:
        """A short name for tables and charts, unique in a fleet."""
        return f"{self.name} #{self.index}"

    @property
    def torch_device(self) -> str:
        """The PyTorch device string, such as ``"cuda:1"``."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


def _capability(architecture: str) -> tuple[int, int]:
    major, _, minor = architecture.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
