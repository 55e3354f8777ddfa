r"""How fast a card that is not there computes, relative to one that was measured.

It is known by its published figures alone. Training mixes work that is bound by arithmetic with
work that is bound by memory, so a device *d* is likely to compute a sample faster than the
measured *p* by the geometric mean of both ratios, and between them::

    r_fp32 = fp32_d/fp32_p     r_memory = bandwidth_d/bandwidth_p     likely √(r_fp32 · r_memory)
    least  min(r_fp32, r_memory) / u          most  max(r_fp32, r_memory) · u

Peaks are a poor prior: the best measured matrix products reach 80 to 87 % of the peak on A100 and
H100, and 51 % on MI300X (EVIDENCE.md §3). So u = 87/80 among cards of one vendor, and 87/51 across
vendors; u = 1, and no ratio at all, for the kind of card that was measured. Another precision adds
Amdahl's law for a share of 0.6 (0.3 to 0.9) in matrix products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from hetkit.devices.catalog import known_spec
from hetkit.devices.device import Device, DeviceSpec
from hetkit.devices.emulated import amp_pace
from hetkit.devices.units import positive
from hetkit.errors import DeviceError
from hetkit.planning.precision_gain import LEAST_SHARE, LIKELY_SHARE, MOST_SHARE
from hetkit.planning.task_profile import TaskProfile

ONE_VENDOR = 0.87 / 0.80
ACROSS_VENDORS = 0.87 / 0.51
"""How far the shares of their peaks that two cards reach may lie apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How many times faster than the profiled device one computes a sample.

    Args:
        likely: The likely factor.
        least, most: The ends of what is to be expected.

    Example:
        >>> Speed(likely=1.0, least=0.5, most=2.0).most
        2.0
    """

    likely: float
    least: float
    most: float


def relative_speed(
    profile: TaskProfile, device: Device, precision: str, pace: Mapping[str, float]
) -> Speed:
    """Returns how many times faster than the profiled one a device computes a sample.

    Args:
        profile: What was measured, on which device and in which precision.
        device: The device in question.
        precision: The precision that it would compute in.
        pace: Speeds that are known, by name or label: they win over the catalogue.

    Raises:
        DeviceError: No speed is published for one of the two, and none is given.

    Example:
        >>> from hetkit.devices.fleet import emulate
        >>> profile = TaskProfile(device="A100", amp="off", launch_s=0.01, sample_s=0.002,
        ...                       sizes=(8.0, 32.0), shapes=())
        >>> speed = relative_speed(profile, emulate("V100")[0], "off", {})
        >>> round(speed.least, 2), round(speed.likely, 2), round(speed.most, 2)
        (0.53, 0.68, 0.88)
    """
    given = pace.get(device.label, pace.get(device.name))
    if given is not None:
        sure = positive(given, name="pace")
        return Speed(likely=sure, least=sure, most=sure)
    measured, spec = known_spec(profile.device), device.spec
    if spec is not None and measured is not None and spec.name == measured.name:
        ratios, unsure = (1.0, 1.0), 1.0
    else:
        ratios = _ratios(profile.device, measured, device)
        same = spec is not None and measured is not None and spec.vendor == measured.vendor
        unsure = ONE_VENDOR if same else ACROSS_VENDORS
    gains = [
        amp_pace(spec, share).get(precision, 1.0) / amp_pace(measured, share).get(profile.amp, 1.0)
        for share in (LIKELY_SHARE, LEAST_SHARE, MOST_SHARE)
    ]
    return Speed(
        likely=sqrt(ratios[0] * ratios[1]) * gains[0],
        least=min(ratios) / unsure * min(gains),
        most=max(ratios) * unsure * max(gains),
    )


def _ratios(name: str, measured: DeviceSpec | None, device: Device) -> tuple[float, float]:
    figures = [
        (spec.fp32_flops, spec.memory_bytes_per_s) if spec is not None else (None, None)
        for spec in (device.spec, measured)
    ]
    (fp32, memory), (fp32_there, memory_there) = figures
    if not (fp32 and memory and fp32_there and memory_there):
        unknown = name if not (fp32_there and memory_there) else device.name
        raise DeviceError(
            f"no speed is published for {unknown!r}, so {device.name!r} cannot be compared with "
            f"the profiled {name!r}: give it, as in pace={{{device.name!r}: 2.0}}, twice as fast."
        )
    return fp32 / fp32_there, memory / memory_there
