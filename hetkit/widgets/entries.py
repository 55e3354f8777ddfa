"""Entries: settings as boxes to type in, and the codec with a box for its parameter.

As every control they mirror the session: what a cell has set shows here too, a refused value goes
back, and the line below says when a change takes effect and what is in force until then.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import ipywidgets as ipw

from hetkit.compression import COMPRESSIONS, Compression, parse_compression
from hetkit.errors import SettingsError
from hetkit.settings import Settings
from hetkit.widgets.controls import Choice, effect_note, effect_text
from hetkit.widgets.frames import show_value
from hetkit.widgets.wiring import Mirror, Report, SessionLike, attempt, weakly

MIB = 2**20


class Entry:
    """One setting as a box.

    Args:
        session: Whose setting it is.
        name: The setting's field.
        box: The widget, with a label; its value changes when the typing has ended.
        write: Returns the setting's value as the box shows it.
        read: Returns what to change, by field, for what was typed. May raise a SettingsError.
        report: Takes messages for the status line.
    """

    def __init__(
        self,
        session: SessionLike,
        name: str,
        box: Any,
        *,
        write: Callable[[Any], object],
        read: Callable[[Any], Mapping[str, object]],
        report: Report,
    ) -> None:
        self._session = session
        self._name = name
        self._write = write
        self._read = read
        self._report = report
        self._mirror = Mirror()
        field = Settings.__dataclass_fields__[name]
        self._effect = field.metadata["effect"]
        self.box = box
        box.tooltip = f"{field.metadata['meaning']}; from the {self._effect}"
        self.note = effect_note()
        self.widget = ipw.VBox([box, self.note], layout={"margin": "0 8px 0 0"})
        self.refresh()
        box.observe(weakly(self._type), "value")

    def refresh(self) -> None:
        """Brings the box and its note to the session's settings, whoever changed them."""
        value = getattr(self._session.settings, self._name)
        applied = self._session.applied
        in_force = getattr(applied, self._name) if applied is not None else value
        # Only what the session changed: a refresh must not take away what is being typed.
        shown = self._write(value)
        if self.box.value != shown:
            with self._mirror.showing():
                self.box.value = shown
        # An empty box stands for what its placeholder says.
        default = getattr(self.box, "placeholder", "")
        now = self._write(in_force) or default
        self.note.value = effect_text(self._effect, shown or default, now)

    def _type(self, change: dict[str, Any]) -> None:
        typed = change["new"]
        if not self._mirror.by_hand or typed == self._write(
            getattr(self._session.settings, self._name)
        ):
            return
        attempt(lambda: self._session.set(**self._read(typed)), self._report)
        self.refresh()


class CodecControls:
    """The gradient codec: a dropdown and, where the codec has a parameter, a box for it.

    Args:
        session: Whose ``compression`` setting is shown and changed.
        report: Takes messages for the status line.
    """

    def __init__(self, session: SessionLike, report: Report) -> None:
        self._session = session
        self._report = report
        self._mirror = Mirror()
        field = Settings.__dataclass_fields__["compression"]
        self._effect = field.metadata["effect"]
        self.dropdown = ipw.Dropdown(
            options=COMPRESSIONS,
            description="Compression",
            tooltip=f"{field.metadata['meaning']}; from the {self._effect}",
            style={"description_width": "87px"},
            layout={"width": "183px"},
        )
        self.box = ipw.FloatText(
            description="ratio",
            style={"description_width": "40px"},
            layout={"width": "116px"},
        )
        self.note = effect_note()
        row = ipw.HBox([self.dropdown, self.box])
        self.widget = ipw.VBox([row, self.note], layout={"margin": "0 8px 0 0"})
        self.refresh()
        self.dropdown.observe(weakly(self._choose), "value")
        self.box.observe(weakly(self._type), "value")

    def refresh(self) -> None:
        """Brings dropdown, box and note to the session's settings, whoever changed them."""
        asked = self._session.settings.compression
        spec = parse_compression(asked)
        name, parameter = _option(spec), codec_parameter(spec)
        options = COMPRESSIONS if name in COMPRESSIONS else (*COMPRESSIONS, name)
        with self._mirror.showing():
            if self.dropdown.options != options:
                self.dropdown.options = options
            self.dropdown.value = name
            self.box.layout.display = "none" if parameter is None else "flex"
            if parameter is not None:
                value = getattr(spec, parameter)
                self.box.description = parameter
                self.box.tooltip = f"The {parameter} of {spec.name}; from the {self._effect}"
                self.box.step = 1 if isinstance(value, int) else 0.01
                self.box.value = value
        applied = self._session.applied
        in_force = applied.compression if applied is not None else asked
        self.note.value = effect_text(self._effect, asked, in_force)

    def _choose(self, change: dict[str, Any]) -> None:
        asked = parse_compression(self._session.settings.compression)
        if not self._mirror.by_hand or change["new"] == _option(asked):
            return
        attempt(lambda: self._session.set(compression=change["new"]), self._report)
        self.refresh()

    def _type(self, change: dict[str, Any]) -> None:
        spec = parse_compression(self._session.settings.compression)
        parameter = codec_parameter(spec)
        if not self._mirror.by_hand or parameter is None:
            return
        typed = change["new"]
        if typed == getattr(spec, parameter):
            return
        whole = isinstance(getattr(spec, parameter), int) and float(typed).is_integer()
        value = int(typed) if whole else typed

        def ask() -> None:
            self._session.set(compression=str(replace(spec, **{parameter: value})))

        attempt(ask, self._report)
        self.refresh()


def codec_parameter(spec: Compression) -> str | None:
    """Returns the name of the number that a codec is chosen with, or None where it has none.

    Example:
        >>> from hetkit.compression import Bf16, TopK
        >>> codec_parameter(TopK()), codec_parameter(Bf16())
        ('ratio', None)
    """
    numbers = (
        f.name
        for f in fields(spec)
        if not f.kw_only and isinstance(getattr(spec, f.name), int | float)
    )
    return next(numbers, None)


def settings_controls(
    session: SessionLike, report: Report
) -> dict[str, Choice | CodecControls | Entry]:
    """Returns the dashboard's controls by the setting's name, but for the batches'."""

    def entry(name: str, box: Any, write: Any, read: Any) -> Entry:
        return Entry(session, name, box, write=write, read=read, report=report)

    return {
        "amp": Choice.of_amp(session, report),
        "compression": CodecControls(session, report),
        "lr": entry("lr", _text("Learning rate", 90, "task's"), _write_lr, _read_lr),
        "global_batch": entry(
            "global_batch",
            _number("Global batch", 86),
            int,
            lambda typed: _read_batch(session.settings, typed),
        ),
        "micro_batch": Choice.of_micro_batch(session, report),
        "bucket_bytes": entry(
            "bucket_bytes", _text("Bucket, MiB", 82, "25"), _write_mib, _read_mib
        ),
        "sync_every": entry(
            "sync_every", _number("Sync every", 76), int, lambda typed: {"sync_every": typed}
        ),
    }


def _option(spec: Compression) -> str:
    return spec.name if spec.name in COMPRESSIONS else str(spec)


def _write_lr(lr: float | str | None) -> str:
    return "" if lr is None else show_value(lr)


def _read_lr(typed: str) -> dict[str, object]:
    text = typed.strip()
    try:
        return {"lr": float(text) if text else None}
    except ValueError:  # a factor, or what the settings refuse
        return {"lr": text}


def _read_batch(settings: Settings, total: int) -> dict[str, object]:
    """Returns the changes for a global batch: samples per device become their ratios."""
    batches = settings.batches
    if isinstance(batches, tuple):
        ratios = [batch / sum(batches) for batch in batches]
        return {"global_batch": total, "batches": ratios}
    return {"global_batch": total}


def _write_mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / MIB:g}"


def _read_mib(typed: str) -> dict[str, object]:
    text = typed.strip()
    try:
        return {"bucket_bytes": round(float(text) * MIB) if text else None}
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            f"the bucket size is a number of MiB, or nothing for PyTorch's own 25, not {typed!r}."
        ) from error


def _text(label: str, label_px: int, placeholder: str) -> Any:
    return ipw.Text(
        description=label,
        placeholder=placeholder,
        continuous_update=False,
        style={"description_width": f"{label_px}px"},
        layout={"width": f"{label_px + 66}px"},
    )


def _number(label: str, label_px: int) -> Any:
    return ipw.IntText(
        description=label,
        style={"description_width": f"{label_px}px"},
        layout={"width": f"{label_px + 76}px"},
    )
