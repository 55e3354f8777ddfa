"""A what-if as a table: now, as measured, beside what is predicted, and what a codec is worth."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape

from hetkit.compression import parse_compression
from hetkit.devices.table import html_table, text_table
from hetkit.planning.exposure import LinkFit
from hetkit.planning.situation import CodecCost, Parts, Situation
from hetkit.planning.what_if import Prediction, predict

LEAST_GAIN = 0.05
"""A codec is recommended only above this: it changes what is learned, if little."""

_RATES = (1e3, 1e13)
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """What a change of settings is predicted to do.

    Args:
        changes: What was asked for, as text.
        now: The step as measured, on the rank that computes longest.
        samples_per_s: The throughput now.
        prediction: The step as predicted.
        emulated: Whether the devices are emulated.
        codec: The codec that the change would switch on; None where it switches none on.
        break_even_bytes_per_s: The rate of a rank's link below which that codec shortens the step:
            0 where it never does, infinite where it always does; None where it is not known.

    Example:
        >>> now = Parts(data_s=0.0, compute_s=0.06, wait_s=0.0, transfer_s=0.04, codec_s=0.0,
        ...             optimizer_s=0.0, other_s=0.0)
        >>> now.step_s
        0.1
    """

    changes: tuple[str, ...]
    now: Parts
    samples_per_s: float
    prediction: Prediction
    emulated: bool
    codec: str | None = None
    break_even_bytes_per_s: float | None = None

    @property
    def gain(self) -> float:
        """1 − time per sample predicted / time per sample now."""
        return 1 - self.samples_per_s / self.prediction.samples_per_s

    @property
    def recommended(self) -> bool | None:
        """Whether the codec is worth switching on: it gains over 5 %, surely; None without one."""
        if self.codec is None:
            return None
        sure = self.prediction.high_s / self.prediction.plan.global_batch < 1 / self.samples_per_s
        return self.gain > LEAST_GAIN and sure

    @property
    def notes(self) -> tuple[str, ...]:
        """What the codec is worth, and what the figures leave out."""
        lines = [
            f"19 in 20: the median step lies in {_ms(self.prediction.low_s)} … "
            f"{_ms(self.prediction.high_s)}"
        ]
        if self.codec is not None:
            lines.append(self._worth())
        return (*lines, *self.prediction.notes)

    def _worth(self) -> str:
        rate = self.break_even_bytes_per_s
        word = "recommended" if self.recommended else "not recommended"
        text = f"{self.codec}: {word} (a gain of {self.gain:.1%}; from {LEAST_GAIN:.0%} it is)"
        if rate is None:
            return text
        if rate == 0 or math.isinf(rate):
            return f"{text}; it {'never' if rate == 0 else 'always'} shortens this step"
        return f"{text}; it shortens the step where a rank's link is below {rate / 1e9:.3g} GB/s"

    @property
    def _title(self) -> str:
        basis = "predicted from measured steps" + (", emulated" if self.emulated else "")
        return f"What if {', '.join(self.changes) or 'nothing changes'} ({basis})"

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        new = self.prediction
        names = [part.name for part in fields(Parts)]
        rows = [
            _row(name.removesuffix("_s"), getattr(self.now, name), getattr(new.parts, name))
            for name in names
        ]
        rows.append(_row("step", self.now.step_s, new.step_s))
        speeds = (self.samples_per_s, new.samples_per_s)
        change = f"{speeds[1] / speeds[0] - 1:+.1%}"
        rows.append(("samples/s", f"{speeds[0]:,.1f}", f"{speeds[1]:,.1f}", change))
        return ("part", "now (measured)", "predicted", "change"), rows

    def __str__(self) -> str:
        return "\n".join([self._title, text_table(*self._table()), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return html_table(*self._table(), caption=self._title) + notes


def compare(
    now: Situation,
    prediction: Prediction,
    *,
    changes: Sequence[str],
    costs: Mapping[str, CodecCost],
    tensor_bytes: Sequence[float] = (),
) -> WhatIf:
    """Puts a prediction beside what it was made from."""
    text = prediction.plan.compression
    switches = text not in ("none", now.plan.compression) and prediction.plan.world_size > 1
    rate = None
    if switches and text in costs:
        rate = break_even(now, prediction, costs=costs, tensor_bytes=tensor_bytes)
    return WhatIf(
        changes=tuple(changes),
        now=now.parts,
        samples_per_s=now.plan.global_batch / now.parts.step_s,
        prediction=prediction,
        emulated=now.emulated,
        codec=parse_compression(text).name if switches else None,
        break_even_bytes_per_s=rate,
    )


def break_even(
    now: Situation,
    prediction: Prediction,
    *,
    costs: Mapping[str, CodecCost],
    tensor_bytes: Sequence[float] = (),
) -> float | None:
    """Returns the rate of a rank's link below which a codec shortens the step.

    Nothing overlapped, that is B* = (bytes without − bytes with)/(codec seconds + further hops)
    (EVIDENCE.md §4); overlap moves it, so the two predicted steps are compared at one rate after
    the other, halving the range in which the sign of their difference changes.

    Returns:
        Bytes per second; 0: never, infinite: always; None: the links are not known.
    """
    if now.link is None or prediction.plan.hierarchy or now.plan.hierarchy:
        return None
    link = now.link

    def gains_s(rate: float) -> float:
        fit = LinkFit(hop_s=link.hop_s, byte_s=1 / rate, error=0.0, certain=True)
        # What would be measured at that rate is not known: more than enough, so that no part of
        # the difference is cut off at 0.
        room_s = 4 * sum(now.bucket_bytes) / rate + 1.0
        base = replace(now, link=fit, parts=replace(now.parts, transfer_s=room_s, codec_s=room_s))
        plans = (replace(prediction.plan, compression="none"), prediction.plan)
        plain, coded = (
            predict(base, plan, costs=costs, tensor_bytes=tensor_bytes).parts for plan in plans
        )
        return (plain.transfer_s - coded.transfer_s) + (plain.codec_s - coded.codec_s)

    low, high = _RATES
    if gains_s(low) <= 0:
        return 0.0
    if gains_s(high) > 0:
        return math.inf
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains_s(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def _row(name: str, now_s: float, new_s: float) -> tuple[str, ...]:
    change = f"{(new_s - now_s) * 1e3:+.1f} ms" if now_s != new_s else "="
    return name, _ms(now_s), _ms(new_s), change


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
