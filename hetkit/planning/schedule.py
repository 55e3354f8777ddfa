"""From settings to a plan: what each rank does, given what the devices can do.

Pure: the coordinator asks, sends what comes out, and keeps nothing else in mind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetkit.devices.device import Device
from hetkit.errors import SettingsError
from hetkit.plan import Plan
from hetkit.planning.batch_split import even_split, ratio_split
from hetkit.planning.islands import islands_pay, natural_islands
from hetkit.settings import Settings, lr_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where in the training a plan begins.

    Args:
        epoch: The epoch, from 0.
        step: The first step that the plan is for.
        epoch_first_step: The epoch's first step.
        samples: Samples in the training set.
    """

    epoch: int
    step: int
    epoch_first_step: int
    samples: int


def epoch_steps(samples: int, global_batch: int) -> int:
    """Returns the steps of an epoch; the last takes what is left.

    Example:
        >>> epoch_steps(1000, 256)
        4
    """
    return math.ceil(samples / global_batch)


def make_plan(
    settings: Settings,
    devices: Sequence[Device],
    position: Position,
    *,
    version: int,
    balanced: Sequence[int] | None = None,
    micro_caps: Sequence[int | None] | None = None,
    reason: str,
) -> Plan:
    """Returns the plan that ``settings`` ask for.

    Args:
        settings: What the user wants.
        devices: What runs the ranks, in rank order.
        position: Where the plan begins.
        version: The plan's number.
        balanced: The balancer's batches, used for ``batches="auto"``; None: even.
        micro_caps: Largest micro-batch that fits each device's memory; None: no limit.
        reason: Why this plan is made.

    Raises:
        SettingsError: A list has the wrong length, or a device lacks the precision.
    """
    world_size = len(devices)
    settings.check_ranks(world_size)
    batches = resolve_batches(settings, world_size, balanced)
    factor = lr_factor(settings.lr)
    warm = position.epoch >= settings.compression_warmup
    return Plan(
        version=version,
        epoch=position.epoch,
        first_step=position.step,
        epoch_first_step=position.epoch_first_step,
        epoch_steps=epoch_steps(position.samples, settings.global_batch),
        global_batch=settings.global_batch,
        batches=batches,
        micro_batches=_micro_batches(settings, micro_caps or [None] * world_size),
        amp=resolve_amp(settings, devices),
        compression=settings.compression if warm else "none",
        guard_every=settings.guard_every,
        hierarchy=resolve_islands(settings, devices),
        tf32=settings.tf32,
        lr=float(settings.lr) if isinstance(settings.lr, (int, float)) else None,
        lr_factor=factor,
        lr_rule=settings.lr_rule,
        clip_norm=settings.clip_norm,
        bucket_bytes=settings.bucket_bytes,
        sync_every=settings.sync_every,
        outer_momentum=settings.outer_momentum,
        reason=reason,
    )


def resolve_batches(
    settings: Settings, world_size: int, balanced: Sequence[int] | None
) -> tuple[int, ...]:
    """Returns samples per rank that sum to the global batch."""
    wanted = settings.batches
    if isinstance(wanted, str):
        if wanted == "auto" and balanced is not None:
            return ratio_split(balanced, settings.global_batch)
        return even_split(settings.global_batch, world_size)
    if all(isinstance(batch, int) for batch in wanted):
        return tuple(int(batch) for batch in wanted)
    return ratio_split(wanted, settings.global_batch)


def resolve_amp(settings: Settings, devices: Sequence[Device]) -> tuple[str, ...]:
    """Returns each rank's precision; ``"auto"`` is the best that its device has.

    Raises:
        SettingsError: A device does not have the precision that was asked for.
    """
    wanted = settings.amp
    modes = wanted if isinstance(wanted, tuple) else (wanted,) * len(devices)
    return tuple(_precision(mode, device) for mode, device in zip(modes, devices, strict=True))


def resolve_islands(settings: Settings, devices: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    """Returns the islands in which gradients are summed first, as ranks; empty: none.

    ``"auto"`` takes the fleet's own (`hetkit.planning.islands`), mostly each host's devices, unless
    the links are known and one flat exchange by the codec is as fast. One island, or islands of one
    device each, are none: all ranks exchange with all others there, as without a hierarchy.

    Example:
        >>> a = Device(name="cpu", kind="cpu", index=0, key="cpu:0", host="a")
        >>> b = Device(name="cpu", kind="cpu", index=0, key="cpu:0", host="b")
        >>> resolve_islands(Settings(), [a, b, a])
        ((0, 2), (1,))
    """
    if settings.hierarchy == "off":
        return ()
    if isinstance(settings.hierarchy, tuple):
        islands = settings.hierarchy
    else:
        islands = natural_islands(devices)
        if not islands_pay(devices, islands, settings.compression):
            return ()
    return islands if 1 < len(islands) < len(devices) else ()


def _precision(mode: str, device: Device) -> str:
    has = device.precisions
    if mode == "auto":
        return has[0] if has else "off"
    if mode != "off" and mode not in has:
        allowed = ", ".join(repr(each) for each in ("off", "auto", *has))
        raise SettingsError(
            f"{device.label} does not compute in {mode!r}: it takes {allowed}. "
            'amp="auto" gives each device the best it has; a list gives one for each.'
        )
    return mode


def _micro_batches(settings: Settings, caps: Sequence[int | None]) -> tuple[int, ...]:
    wanted = settings.micro_batch or settings.global_batch
    return tuple(wanted if cap is None else max(1, min(wanted, cap)) for cap in caps)


def describe_changes(before: Settings | None, after: Settings) -> tuple[str, ...]:
    """Returns what differs, for the ledger: ``("amp: off → bf16",)``.

    Example:
        >>> describe_changes(Settings(), Settings(amp="bf16"))
        ('amp: off → bf16',)
    """
    if before is None or before == after:
        return ()
    names = before.__dataclass_fields__
    return tuple(
        f"{name}: {_shown(getattr(before, name))} → {_shown(getattr(after, name))}"
        for name in names
        if getattr(before, name) != getattr(after, name)
    )


def _shown(value: object) -> str:
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
