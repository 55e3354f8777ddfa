"""How much faster a device computes in another precision, before it has been tried there.

Only the share f of the time that goes into matrix products is sped up (Amdahl's law), by the ratio
of the published peaks::

    gain(f) = 1 / ((1 − f) + f · fp32_flops/other_flops)

f is the model's and not known here: 0.6 is taken as likely, 0.3 and 0.9 as the ends. An emulated
device computes by its own figure, and so it is predicted by that; its ends are the card's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetkit.devices.device import Device
from hetkit.devices.emulated import amp_pace
from hetkit.plan import Plan
from hetkit.planning.step_time import ComputeTime, StepTime

LIKELY_SHARE, LEAST_SHARE, MOST_SHARE = 0.6, 0.3, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times faster a sample is computed.

    Args:
        likely: The likely factor.
        least, most: The ends of what is to be expected.
        basis: Where it comes from; empty where nothing changes.

    Example:
        >>> Gain().likely
        1.0
    """

    likely: float = 1.0
    least: float = 1.0
    most: float = 1.0
    basis: str = ""


def precision_gains(devices: Sequence[Device], before: Plan, after: Plan) -> tuple[Gain, ...]:
    """Returns each device's gain from one plan's precision to another's."""
    rows = zip(devices, before.amp, after.amp, strict=True)
    return tuple(_gain(device, (old, before.tf32), (new, after.tf32)) for device, old, new in rows)


def faster(model: ComputeTime, factor: float, batch: int, micro_batch: int) -> ComputeTime:
    """Returns a device's step time where each sample is computed ``factor`` times faster.

    A pass costs as much as before. Of a curve, the straight line through 0 and its present size.

    Example:
        >>> faster(StepTime(launch_s=1.0, sample_s=1.0), 2.0, batch=8, micro_batch=8)
        StepTime(launch_s=1.0, sample_s=0.5)
    """
    if factor == 1.0:
        return model
    if isinstance(model, StepTime):
        return StepTime(launch_s=model.launch_s, sample_s=model.sample_s / factor)
    size = max(1, batch)
    return StepTime(launch_s=0.0, sample_s=model.seconds(size, micro_batch) / size / factor)


def _gain(device: Device, old: tuple[str, bool], new: tuple[str, bool]) -> Gain:
    if old == new or (device.emulated and old[0] == new[0]):  # TF32 is not emulated
        return Gain()
    ends = sorted(
        _speed(device, new, share) / _speed(device, old, share)
        for share in (LEAST_SHARE, MOST_SHARE)
    )
    likely = _speed(device, new, LIKELY_SHARE) / _speed(device, old, LIKELY_SHARE)
    if device.emulation is not None:
        paces = device.emulation.amp_pace
        likely = paces.get(new[0], 1.0) / paces.get(old[0], 1.0)
    known = device.spec is not None and device.spec.fp32_flops is not None
    basis = "the catalogue's peaks" if known else "no figure at all: taken as no faster"
    return Gain(likely=likely, least=min(likely, *ends), most=max(likely, *ends), basis=basis)


def _speed(device: Device, mode: tuple[str, bool], share: float) -> float:
    precision, tf32 = mode
    if precision != "off":
        return amp_pace(device.spec, share).get(precision, 1.0)
    spec = device.spec
    if not tf32 or spec is None or not spec.tf32_flops or not spec.fp32_flops:
        return 1.0
    return 1 / ((1 - share) + share * spec.fp32_flops / spec.tf32_flops)
