"""Frames: what the strip in the browser is sent, made from a session. Pure, no thread, no widget.

A frame is a small head (JSON: state, progress, one entry per device) and the points of the charts
that are new, packed as float32 columns::

    layout  [["loss", 3], ["speed:0", 3], …]
    data    | x x x | y y y | x x x | y y y | …        x = step − base, so that float32 is exact
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hetkit.plan import Plan
from hetkit.records.history import Event, History, RankStep, StepRecord
from hetkit.settings import Settings
from hetkit.widgets.wiring import ProgressLike, SessionLike

Array = npt.NDArray[np.float64]

PARTS = ("data", "compute", "wait", "transfer", "optimizer", "other")
"""Parts of a step as the strip stacks them; *transfer* includes the codec."""

POINTS = 2000
"""Most points of one series that are sent or kept."""

WINDOW_S = 5.0
"""What is shown as "now" is the mean over this many seconds, or over the last step."""


def decimate(steps: Array, values: Array, limit: int) -> tuple[Array, Array]:
    """Thins a series to at most ``limit`` points: each bucket keeps its lowest and its highest.

    Peaks and stalls stay visible, which a mean would hide. The first and the last point stay.
    A bucket without a reading keeps one NaN, so a gap stays a gap.

    Args:
        steps: The x values, shape (n,).
        values: The y values, shape (n,), NaN where there was no reading.
        limit: At least 4.

    Example:
        >>> x, y = decimate(np.arange(100.0), np.arange(100.0) % 10, 10)
        >>> len(x) <= 10, float(y.min()), float(y.max())
        (True, 0.0, 9.0)
    """
    if len(steps) <= limit:
        return steps, values
    keep = {0, len(steps) - 1}
    edges = np.linspace(1, len(steps) - 1, (limit - 2) // 2 + 1).astype(int)
    for first, last in pairwise(edges):
        bucket = values[first:last]
        if np.isnan(bucket).all():
            keep.add(int(first))
        else:
            keep.update((int(first + np.nanargmin(bucket)), int(first + np.nanargmax(bucket))))
    kept = np.fromiter(sorted(keep), dtype=int)
    return steps[kept], values[kept]


def new_points(history: History, after: int, limit: int = POINTS) -> dict[str, tuple[Array, Array]]:
    """Returns every chart series' points of steps above ``after``, thinned to ``limit``."""
    wanted: list[tuple[str, str, int | None]] = [
        ("loss", "loss", None),
        ("comm", "comm_share", None),
        ("speed", "samples_per_s", None),
    ]
    wanted += [(f"speed:{rank}", "samples_per_s", rank) for rank in range(history.world_size)]
    points = {}
    for key, name, rank in wanted:
        steps, values = (np.asarray(a, dtype=float) for a in history.series(name, rank))
        new = steps > after
        points[key] = decimate(steps[new], values[new], limit)
    return points


def pack(points: Mapping[str, tuple[Array, Array]]) -> tuple[int, list[list[Any]], bytes]:
    """Returns the base step, the layout and the columns as little-endian float32."""
    filled = {key: (x, y) for key, (x, y) in points.items() if len(x)}
    base = int(min((x.min() for x, _ in filled.values()), default=0))
    layout = [[key, len(x)] for key, (x, _) in filled.items()]
    columns = [column for x, y in filled.values() for column in (x - base, y)]
    data = b"".join(column.astype("<f4").tobytes() for column in columns)
    return base, layout, data


def window(records: Sequence[StepRecord], plan: Plan | None) -> Sequence[StepRecord]:
    """Returns the newest records that make up "now".

    A mean over a change of the plan would be the speed of neither, so they go back to the plan's
    first step at most (all, while the plan has no step yet).
    """
    if not records:
        return records
    newest = records[-1]
    first = plan.first_step if plan is not None and plan.first_step <= newest.step else 0
    since = newest.time_s - WINDOW_S
    return [r for r in records if r.step >= first and (r.time_s > since or r is newest)]


def head(session: SessionLike, now: Sequence[StepRecord]) -> dict[str, Any]:
    """Returns what the strip shows as the present; ``now`` is the window's records."""
    seconds = math.fsum(r.step_s for r in now)
    devices = [device_figures(session, place, now) for place in range(len(session.devices))]
    shown = {
        "state": session.state,
        "progress": _progress(session.progress),
        "samples_per_s": sum(r.samples for r in now) / seconds if seconds else None,
        "loss": now[-1].loss if now else None,
        "guard": guard(session.history, session.plan),
        "notice": notice(session.history, session.progress.epoch_first_step),
        "devices": devices,
        "pending": pending(session.settings, session.applied),
        "error": describe_error(session.error),
    }
    return compact(shown)  # type: ignore[no-any-return]


def compact(value: Any) -> Any:
    """Returns plain data with its floats cut to five digits: more are sent than anyone can see.

    Example:
        >>> compact({"step_s": 0.123456789, "parts": [1 / 3, None], "step": 1234567})
        {'step_s': 0.12346, 'parts': [0.33333, None], 'step': 1234567}
    """
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: compact(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [compact(part) for part in value]
    return value


def fleet(session: SessionLike) -> list[dict[str, Any]]:
    """Returns what does not change about the devices."""
    return [
        {"label": d.label, "emulated": d.emulated, "memory_bytes": d.memory_bytes}
        for d in session.devices
    ]


def device_figures(session: SessionLike, place: int, now: Sequence[StepRecord]) -> dict[str, Any]:
    """Returns one device's present figures; what was not measured is None."""
    rows = [row for record in now for row in record.ranks if row.rank == place]
    plan, ranks = session.plan, session.ranks
    seat = ranks.index(place) if place in ranks else len(ranks)
    planned = plan if plan is not None and seat < plan.world_size else None
    seconds = math.fsum(row.step_s for row in rows)
    compute = math.fsum(row.compute_s for row in rows)
    samples = sum(row.batch for row in rows)
    return {
        "samples_per_s": samples / seconds if seconds else None,
        "pace": samples / compute if compute else None,
        "batch": planned.batches[seat] if planned else None,
        "amp": planned.amp[seat] if planned else None,
        "memory_bytes": rows[-1].memory_bytes if rows else None,
        "memory_peak_bytes": rows[-1].memory_peak_bytes if rows else None,
        "step_s": seconds / len(rows) if rows else None,
        "parts": _parts(rows),
    }


def guard(history: History, plan: Plan | None) -> dict[str, float | None] | None:
    """Returns the newest comparison of the compressed gradient with the true one.

    None without compression, and where the guard has not looked yet.
    """
    if plan is None or plan.compression == "none":
        return None
    for record in reversed(history.records_since(plan.epoch_first_step - 1)):
        if record.guard_cosine is not None:
            return {"cosine": record.guard_cosine, "error": record.guard_error}
    return None


def notice(history: History, first_step: int) -> str | None:
    """Returns the newest thing that a person should know of the steps since ``first_step``."""
    told = (e.text for e in reversed(history.events) if e.kind == "notice" and e.step >= first_step)
    return next(told, None)


def pending(requested: Settings, applied: Settings | None) -> list[dict[str, str]]:
    """Returns the settings that were asked for and are not yet in force."""
    if applied is None:
        return []
    return [
        {
            "name": field.name,
            "requested": show_value(getattr(requested, field.name)),
            "applied": show_value(getattr(applied, field.name)),
            "effect": field.metadata["effect"],
        }
        for field in fields(requested)
        if getattr(requested, field.name) != getattr(applied, field.name)
    ]


def show_value(value: object) -> str:
    """Returns a setting's value as a person reads it.

    Example:
        >>> show_value((48, 16)), show_value(None), show_value("bf16")
        ('48 : 16', 'default', 'bf16')
    """
    if value is None:
        return "default"
    if isinstance(value, tuple):
        return " : ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value)


def describe_error(error: BaseException | None) -> str | None:
    """Returns the error's type and message."""
    return None if error is None else f"{type(error).__name__}: {error}"


def event_entry(event: Event) -> dict[str, Any]:
    """Returns the event as a mark for the charts."""
    return {"step": event.step, "kind": event.kind, "text": event.text, "rank": event.rank}


def _parts(rows: Sequence[RankStep]) -> list[float] | None:
    if not rows:
        return None
    totals = [
        math.fsum(row.data_s for row in rows),
        math.fsum(row.compute_s for row in rows),
        math.fsum(row.wait_s for row in rows),
        math.fsum(row.transfer_s + row.codec_s for row in rows),
        math.fsum(row.optimizer_s for row in rows),
        math.fsum(row.other_s for row in rows),
    ]
    return [total / len(rows) for total in totals]


def _progress(progress: ProgressLike) -> dict[str, Any]:
    done = progress.step - progress.epoch_first_step
    part = min(1.0, max(0.0, done / progress.epoch_steps)) if progress.epoch_steps else 0.0
    target = progress.epochs_target
    return {
        "epoch": progress.epoch,
        "epochs_target": target,
        "step": progress.step,
        "share": min(1.0, (progress.epoch + part) / target) if target else 0.0,
        "eta_s": progress.eta_s,
    }
