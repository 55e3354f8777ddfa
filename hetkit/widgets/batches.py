"""The batch split as controls: one slider and one box per device, always summing to the batch."""

from collections.abc import Sequence
from typing import Any

import ipywidgets as ipw

from hetkit.settings import Settings
from hetkit.widgets.controls import effect_note, effect_text
from hetkit.widgets.wiring import Mirror, Report, SessionLike, attempt, weakly

MODES = ("auto", "even", "manual")


def apportion(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Splits ``total`` by weights: whole parts first, then the largest remainders (Hamilton).

    Args:
        weights: Finite and not negative; all zero means evenly.
        total: What the parts sum to.

    Example:
        >>> apportion([2.3, 1], 64), apportion([0, 0], 3)
        ((45, 19), (2, 1))
    """
    whole = sum(weights)
    shares = [total * w / whole if whole else total / len(weights) for w in weights]
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def share_rest(batches: Sequence[int], rank: int, batch: int) -> tuple[int, ...]:
    """Gives ``rank`` the ``batch`` and shares the rest among the others, in their proportion.

    Args:
        batches: Samples per rank so far; their sum is kept.
        rank: Whose batch was moved.
        batch: Its new batch; kept between 0 and the sum.

    Example:
        >>> share_rest((32, 16, 16), 0, 48)
        (48, 8, 8)
    """
    total = sum(batches)
    others = [b for i, b in enumerate(batches) if i != rank]
    if not others:
        return (total,)
    batch = min(max(batch, 0), total)
    rest = list(apportion(others, total - batch))
    return (*rest[:rank], batch, *rest[rank:])


class BatchControls:
    """Mode (auto, even, manual) and, for manual, a slider and a box per device.

    Args:
        session: Whose ``batches`` setting is shown and changed.
        report: Takes messages for the status line.
    """

    def __init__(self, session: SessionLike, report: Report) -> None:
        self._session = session
        self._report = report
        self._mirror = Mirror()
        self._shown: tuple[int, ...] = ()
        self.mode = ipw.Dropdown(
            options=MODES,
            description="Batches",
            tooltip="Balanced by measured speed, the same for every device, or by sliders",
            style={"description_width": "59px"},
            layout={"width": "147px"},
        )
        text_px = min(190, max(84, *(7 * len(device.label) + 14 for device in session.devices)))
        self.sliders = [_slider(device.label, text_px) for device in session.devices]
        self.boxes = [_box(device.label) for device in session.devices]
        self.shares = [ipw.Label(layout={"width": "40px"}) for _ in session.devices]
        rows = [ipw.HBox(row) for row in zip(self.sliders, self.boxes, self.shares, strict=True)]
        self._note = effect_note()
        self.widget = ipw.VBox([self.mode, self._note], layout={"margin": "0 8px 0 0"})
        self.manual = ipw.HBox(rows, layout={"flex_flow": "row wrap"})
        self.refresh()
        self.mode.observe(weakly(self._choose), "value")
        for rank, (slider, box) in enumerate(zip(self.sliders, self.boxes, strict=True)):
            slider.observe(weakly(self._move, rank), "value")
            box.observe(weakly(self._move, rank), "value")

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples per device that the settings ask for, or, on auto, that the plan gives."""
        asked = self._session.settings.batches
        total = self._session.settings.global_batch
        world_size = len(self._session.devices)
        if isinstance(asked, tuple):
            return apportion(asked, total)
        plan = self._session.plan
        if asked == "auto" and plan is not None and plan.world_size == world_size:
            return apportion(plan.batches, total)
        return apportion([1] * world_size, total)

    def refresh(self) -> None:
        """Brings the controls to the session's settings, whoever changed them."""
        with self._mirror.showing():
            self._shown = batches = self.batches
            total = sum(batches)
            self.mode.value = self._asked_mode
            self.manual.layout.display = "flex" if self._asked_mode == "manual" else "none"
            for rank, batch in enumerate(batches):
                for control in (self.sliders[rank], self.boxes[rank]):
                    control.max = total
                    control.value = batch
                self.shares[rank].value = f"{batch / total:.0%}"
        requested, applied = self._session.settings, self._session.applied
        effect = Settings.__dataclass_fields__["batches"].metadata["effect"]
        in_force = (applied or requested).batches
        self._note.value = effect_text(effect, requested.batches, in_force)

    @property
    def _asked_mode(self) -> str:
        asked = self._session.settings.batches
        return asked if isinstance(asked, str) else "manual"

    def _choose(self, change: dict[str, Any]) -> None:
        mode = change["new"]
        if not self._mirror.by_hand or mode == self._asked_mode:
            return
        wanted = list(self.batches) if mode == "manual" else mode
        attempt(lambda: self._session.set(batches=wanted), self._report)
        self.refresh()

    def _move(self, rank: int, change: dict[str, Any]) -> None:
        batch = change["new"]
        if not self._mirror.by_hand or self._asked_mode != "manual" or batch == self._shown[rank]:
            return
        wanted = share_rest(self._shown, rank, batch)
        attempt(lambda: self._session.set(batches=list(wanted)), self._report)
        self.refresh()


def _slider(label: str, text_px: int) -> Any:
    return ipw.IntSlider(
        description=label,
        continuous_update=False,
        readout=False,
        style={"description_width": f"{text_px}px"},
        layout={"width": f"{text_px + 152}px"},
    )


def _box(label: str) -> Any:
    return ipw.BoundedIntText(
        description="samples",
        tooltip=f"Samples of {label} in a step",
        style={"description_width": "56px"},
        layout={"width": "120px"},
    )
