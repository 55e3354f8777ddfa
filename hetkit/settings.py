"""Settings: what a user may change while the training runs.

One frozen record; `Session.set` and the dashboard's controls are both made from its fields. Each
field carries its meaning, its unit and when a change takes effect as metadata.
"""

import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

from hetkit.compression import parse_compression
from hetkit.errors import SettingsError

AMP_MODES = ("off", "auto", "bf16", "fp16")
"""Precisions of the forward pass: none, the best the device has, or one by name."""

LR_RULES = ("none", "linear", "sqrt")
"""How the learning rate may follow the global batch."""

_LARGEST_INT = 2**63 - 1  # what a message can carry

Effect = Literal["next grant", "next epoch"]


def _setting(default: Any, meaning: str, *, unit: str = "", effect: Effect) -> Any:
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "effect": effect})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may change between epochs, or between grants, of a running session.

    Args:
        batches: Samples per rank in a step. ``"auto"`` (default) balances by measured speed,
            ``"even"`` splits evenly, a list of ints gives the samples per rank (their sum is the
            global batch), a list of floats gives ratios. From the next grant.
        micro_batch: Largest number of samples in one forward pass. ``None`` (default): as large
            as the device's memory allows; an int: the same on every device, with unequal counts.
            From the next grant.
        amp: Precision of the forward pass: ``"off"`` (default, float32), ``"auto"`` (bf16 where
            the device has it, else fp16), ``"bf16"``, ``"fp16"``, or a list with one per rank.
            From the next epoch.
        tf32: Let float32 matrix products run in TF32 where the device has it. Default False.
            From the next epoch.
        compression: Gradient codec: ``"none"`` (default), another of
            `hetkit.compression.COMPRESSIONS`, one with parameters (``hk.TopK(0.05)`` or
            ``"topk(ratio=0.05)"``), or ``"task:name"`` for one of the task's own. Kept as its text.
            From the next epoch.
        compression_warmup: Epochs, from the training's first, without compression. Default 0. From
            the next epoch.
        guard_every: Steps between two looks of the guard, in which the gradient also travels
            uncompressed and is compared with what the codec made of it. Default 100, 0 for none;
            without compression there is nothing to look at. From the next epoch.
        hierarchy: Islands of fast links, inside which gradients are summed before one rank of each
            exchanges with the others: ``"auto"`` (default) takes the devices of each host where
            there are several hosts, ``"off"`` none, a list gives the islands, each a list of ranks.
            From the next epoch.
        lr: Learning rate of every parameter group: ``None`` (default) leaves the task's, a number
            sets it, ``"x0.5"`` multiplies the task's (and its scheduler's) by that factor. From
            the next epoch.
        lr_rule: How the task's own rate follows ``global_batch``, with k = global batch / the
            training's first one: ``"none"`` (default) leaves it, ``"linear"`` multiplies by k (the
            usual one for SGD), ``"sqrt"`` by √k (for Adam). A number in ``lr`` is taken as it is;
            a factor is multiplied with it. From the next epoch.
        global_batch: Samples in one step over all ranks. From the next epoch.
        clip_norm: Largest norm of the whole gradient, clipped after the exchange. ``None``
            (default) for no clipping. From the next epoch.
        bucket_bytes: Size of DDP's gradient buckets. ``None`` (default) is PyTorch's 25 MiB. From
            the next epoch.
        sync_every: Steps between two synchronisations, H. 1 (default): every gradient is shared,
            and the maths is that of one process. Above 1, *different maths*: each rank makes H
            steps on its own samples and then the parameters' changes are averaged (local SGD), so
            about 1/H of the bytes travel, for one more copy of the parameters (two with an outer
            momentum). Clipping, overflows and the optimizer's state are each rank's own meanwhile;
            at an epoch's end all take the optimizer's state of the rank with most samples. Where
            the ranks run freely they stand alike every H-th step of an epoch and at its end; after
            ``step(n)`` in between, ``model()`` and ``save()`` give rank 0's. From the next epoch.
        outer_momentum: Momentum of those averages, in [0, 1) (SlowMo); used where ``sync_every``
            is above 1. Default 0. From the next epoch.

    Raises:
        SettingsError: A value is out of its range; the message names the field.

    Example:
        >>> import hetkit as hk
        >>> settings = hk.Settings(global_batch=64, amp="bf16")
        >>> settings.change(batches=[48, 16]).batches
        (48, 16)
    """

    batches: str | tuple[int, ...] | tuple[float, ...] = _setting(
        "auto", "Samples per rank in a step, or ratios", unit="samples", effect="next grant"
    )
    micro_batch: int | None = _setting(
        None, "Largest forward pass", unit="samples", effect="next grant"
    )
    amp: str | tuple[str, ...] = _setting("off", "Precision of the forward", effect="next epoch")
    tf32: bool = _setting(False, "TF32 for float32 matrix products", effect="next epoch")
    compression: str = _setting("none", "Gradient codec", effect="next epoch")
    compression_warmup: int = _setting(
        0, "First epochs without compression", unit="epochs", effect="next epoch"
    )
    guard_every: int = _setting(
        100, "Steps between two looks of the guard", unit="steps", effect="next epoch"
    )
    hierarchy: str | tuple[tuple[int, ...], ...] = _setting(
        "auto", "Islands of fast links", effect="next epoch"
    )
    lr: float | str | None = _setting(None, "Learning rate", effect="next epoch")
    lr_rule: str = _setting(
        "none", "How the learning rate follows the global batch", effect="next epoch"
    )
    global_batch: int = _setting(
        256, "Samples in a step over all ranks", unit="samples", effect="next epoch"
    )
    clip_norm: float | None = _setting(None, "Largest gradient norm", effect="next epoch")
    bucket_bytes: int | None = _setting(
        None, "Size of DDP's gradient buckets", unit="bytes", effect="next epoch"
    )
    sync_every: int = _setting(
        1, "Steps between two synchronisations", unit="steps", effect="next epoch"
    )
    outer_momentum: float = _setting(0.0, "Momentum of local steps' averages", effect="next epoch")

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _plain(getattr(self, f.name)))
        check_int("global_batch", self.global_batch, minimum=1)
        _check_batches(self.batches, self.global_batch)
        _check_amp(self.amp)
        if not isinstance(self.tf32, bool):
            raise SettingsError(f"tf32 must be True or False, not {self.tf32!r}.")
        object.__setattr__(self, "compression", str(parse_compression(self.compression)))
        check_int("compression_warmup", self.compression_warmup, minimum=0)
        check_int("guard_every", self.guard_every, minimum=0)
        object.__setattr__(self, "hierarchy", _islands(self.hierarchy))
        lr_factor(self.lr)
        if not isinstance(self.lr_rule, str) or self.lr_rule not in LR_RULES:
            raise SettingsError(
                f"lr_rule must be one of {', '.join(LR_RULES)}, not {self.lr_rule!r}."
            )
        if self.micro_batch is not None:
            check_int("micro_batch", self.micro_batch, minimum=1)
        if self.clip_norm is not None:
            _check_positive("clip_norm", self.clip_norm)
        if self.bucket_bytes is not None:
            check_int("bucket_bytes", self.bucket_bytes, minimum=1024)
        check_int("sync_every", self.sync_every, minimum=1)
        if not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise SettingsError(
                f"outer_momentum must be a number from 0 to below 1, not {self.outer_momentum!r}."
            )

    def change(self, **changes: Any) -> "Settings":
        """Returns these settings with some fields changed, validated as a whole.

        Explicit ``batches`` that no longer sum to a changed ``global_batch`` are refused unless
        they are changed with it.

        Raises:
            SettingsError: A name is not a setting, or a value is out of its range.
        """
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise SettingsError(f"{name!r} is not a setting; there are: {', '.join(known)}.")
        return replace(self, **changes)

    def check_ranks(self, world_size: int) -> None:
        """Checks what depends on the number of ranks.

        Raises:
            SettingsError: A list has another length than there are ranks, or the global batch is
                smaller than the number of ranks.
        """
        for name in ("batches", "amp"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != world_size:
                raise SettingsError(
                    f"{name} has {len(value)} values for {world_size} devices: give one for each."
                )
        if isinstance(self.hierarchy, tuple):
            ranks = sorted(rank for island in self.hierarchy for rank in island)
            if ranks != list(range(world_size)):
                raise SettingsError(
                    f"hierarchy must have each of the ranks 0 to {world_size - 1} in one island, "
                    f"not {[list(island) for island in self.hierarchy]}."
                )
        if self.global_batch < world_size:
            raise SettingsError(
                f"global_batch {self.global_batch} is smaller than the number of devices, "
                f"{world_size}: give at least one sample for each, or use fewer devices."
            )


def lr_factor(lr: float | str | None) -> float | None:
    """Returns the factor of ``"x0.5"``, or None where ``lr`` is a number or None.

    Raises:
        SettingsError: ``lr`` is none of the three forms, or not above 0.
    """
    if lr is None:
        return None
    if isinstance(lr, str):
        found = re.fullmatch(r"x(\d+(?:\.\d*)?(?:e[+-]?\d+)?)", lr.strip())
        factor = float(found[1]) if found else 0.0
        if not 0 < factor < math.inf:
            raise SettingsError(f'lr must be a number above 0 or a factor such as "x0.5": {lr!r}.')
        return factor
    _check_positive("lr", lr)
    return None


def _plain(value: Any) -> Any:
    """Returns a list or an array as a tuple, and NumPy's numbers as Python's."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        return _plain_number(value)
    try:
        return tuple(_plain_number(item) for item in value)
    except TypeError:  # an array without dimensions calls itself iterable, and is not
        return value


def _plain_number(value: Any) -> Any:
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else value
    except OverflowError:  # a fraction beyond the floats stays as it is, and is refused
        return value


def check_int(name: str, value: object, *, minimum: int) -> None:
    """Refuses what is not an int of at least ``minimum`` that a message can carry.

    Raises:
        SettingsError: It is not; the message gives ``name``.
    """
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or not minimum <= value <= _LARGEST_INT:  # type: ignore[operator]
        raise SettingsError(f"{name} must be an int of at least {minimum}, not {value!r}.")


def _check_positive(name: str, value: object) -> None:
    if not _is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
        raise SettingsError(f"{name} must be a finite number above 0, not {value!r}.")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= _LARGEST_INT


def _islands(given: object) -> str | tuple[tuple[int, ...], ...]:
    """Returns islands as tuples of ranks, or the word for them."""
    if isinstance(given, str) and given in ("auto", "off"):
        return given
    islands = [_plain(island) for island in given] if isinstance(given, tuple) else []
    good = all(
        isinstance(island, tuple)
        and island
        and all(type(rank) is int and rank >= 0 for rank in island)
        for island in islands
    )
    if not islands or not good:
        raise SettingsError(
            'hierarchy must be "auto", "off" or a list of islands, each a list of ranks, such as '
            f"[[0, 1], [2, 3]], not {given!r}."
        )
    return tuple(islands)


def _check_amp(amp: object) -> None:
    if isinstance(amp, tuple) and not amp:
        raise SettingsError("amp is an empty list: give one precision for each device, or a word.")
    for mode in amp if isinstance(amp, tuple) else (amp,):
        if not isinstance(mode, str) or mode not in AMP_MODES:
            raise SettingsError(f"amp must be one of {', '.join(AMP_MODES)}, not {mode!r}.")


def _check_batches(batches: object, global_batch: int) -> None:
    if isinstance(batches, str):
        if batches not in ("auto", "even"):
            raise SettingsError(
                f'batches must be "auto", "even", a list of ints or a list of ratios: {batches!r}.'
            )
        return
    if not isinstance(batches, tuple) or not batches:
        raise SettingsError(f"batches must be a word or a list with a value per rank: {batches!r}.")
    if all(isinstance(b, int) and not isinstance(b, bool) for b in batches):
        if min(batches) < 0:
            raise SettingsError(f"batches must not be negative: {list(batches)}.")
        if sum(batches) != global_batch:
            raise SettingsError(
                f"batches {list(batches)} sum to {sum(batches)}, not to the global batch "
                f"{global_batch}: mend one of them, or give ratios as floats."
            )
        return
    for ratio in batches:
        if not _is_number(ratio):
            raise SettingsError(f"batches has {ratio!r}, which is not a number.")
        if not 0 <= ratio < math.inf:
            raise SettingsError(f"ratios must be finite and not negative: {list(batches)}.")
    if not 0 < sum(batches) < math.inf:
        raise SettingsError(
            f"ratios must sum to a finite number above 0, not {sum(batches)}: {list(batches)}."
        )
