r"""The profile of a task: what was measured of it on one device, to plan other fleets with.

Everything that a step's time and memory follow from is in it, and nothing that depends on the
fleet: the compute of a pass (a + c·samples), its optimizer and data, the gradient's tensors, when
the backward has them ready, what a micro-batch holds (p + q·μ), and what codecs cost per element.
A file of it is JSON: typed data that anybody can read, and that is checked when it is read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from hetkit.devices.table import html_table, text_table
from hetkit.devices.units import show_memory
from hetkit.errors import PlanError
from hetkit.planning.memory import MemoryModel
from hetkit.planning.situation import CodecCost, Situation
from hetkit.planning.step_time import ComputeTime, StepTime

FORMAT = 1
"""Version of the file; another one is refused."""

Shape = tuple[int, ...]


class Found(Protocol):
    """What a trial on the workers found; see `hetkit.records.trial.Trial`."""

    @property
    def costs(self) -> Mapping[str, CodecCost]:
        """What each codec costs, by its text."""

    @property
    def shapes(self) -> Sequence[Shape]:
        """The gradient's tensors, in the order in which they are ready."""

    @property
    def element_bytes(self) -> int:
        """Size of one of their elements."""

    @property
    def fixed_bytes(self) -> float:
        """Weights, buffers, gradients and optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProfile:
    """What was measured of a task on one device.

    Args:
        device: The device's name, such as ``"A100"``; its figures are those of the catalogue.
        emulated: Whether that device is emulated.
        amp: The precision that was measured: ``"off"``, ``"bf16"`` or ``"fp16"``.
        launch_s: Seconds of compute per micro-batch, whatever its size.
        sample_s: Seconds of compute per sample.
        error: Relative standard error of the compute times. Default 0.
        optimizer_s: Seconds of clipping and the optimizer's step.
        data_s: Seconds of fetching and moving data, per sample.
        other_s: Seconds of a step that nothing explains.
        sizes: Samples per pass that were measured.
        shapes: Shapes of the gradient's tensors, in the model's order.
        element_bytes: Size of one of their elements. Default 4.
        fixed_bytes, sample_bytes: Peak memory of μ samples is fixed_bytes + sample_bytes·μ; None
            where it has no reading.
        ready_shares: Measured (share of the gradient's bytes, share of a pass's compute) at which
            the backward had it ready. Default: not measured.
        codec_element_s: Seconds of encoding and decoding per element, by the codec's text.
        samples: Samples in the training set; 0 where it is not known.

    Raises:
        PlanError: A value is out of its range.

    Example:
        >>> profile = TaskProfile(device="A100", amp="off", launch_s=0.01, sample_s=0.002,
        ...                       sizes=(8.0, 32.0), shapes=((1024, 1024), (1024,)))
        >>> profile.gradient_bytes, profile.compute.seconds(40, micro_batch=20)
        (4198400, 0.1)
        >>> TaskProfile.from_json(profile.to_json()) == profile
        True
    """

    device: str
    amp: str
    launch_s: float
    sample_s: float
    sizes: tuple[float, ...]
    shapes: tuple[Shape, ...]
    emulated: bool = False
    error: float = 0.0
    optimizer_s: float = 0.0
    data_s: float = 0.0
    other_s: float = 0.0
    element_bytes: int = 4
    fixed_bytes: float | None = None
    sample_bytes: float | None = None
    ready_shares: tuple[tuple[float, float], ...] = ()
    codec_element_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    samples: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(float(size) for size in self.sizes))
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        shares = tuple((float(at), float(share)) for at, share in self.ready_shares)
        object.__setattr__(self, "ready_shares", shares)
        if not isinstance(self.device, str) or self.amp not in ("off", "bf16", "fp16"):
            raise PlanError(
                f"a profile needs a device's name and amp off, bf16 or fp16: {self.device!r}, "
                f"{self.amp!r}."
            )
        numbers = ("launch_s", "error", "optimizer_s", "data_s", "fixed_bytes", "sample_bytes")
        for name in numbers:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise PlanError(f"a profile's {name} must be finite and at least 0, not {value!r}.")
        if not 0 < self.sample_s < math.inf or self.element_bytes < 1:
            raise PlanError("a profile's sample_s must be above 0, its element_bytes at least 1.")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise PlanError(f"a profile's shapes are lengths of at least 0: {self.shapes}.")

    @classmethod
    def of(
        cls,
        now: Situation,
        found: Found,
        peaks: Sequence[float | None],
        costs: Mapping[str, CodecCost] | None = None,
    ) -> "TaskProfile":
        """Returns the profile on the device that computes longest, in its own seconds.

        Args:
            now: What was measured of the step.
            found: What a trial found of the gradient and of codecs.
            peaks: Peak memory of each rank in bytes; None where there is no reading.
            costs: What codecs were found to cost before. Default: nothing.
        """
        plan, devices = now.plan, now.devices
        rows = zip(now.ranks, plan.batches, plan.micro_batches, strict=True)
        times = [rank.model.seconds(batch, micro) for rank, batch, micro in rows]
        place = times.index(max(times))
        emulation = devices[place].emulation
        scale = emulation.time_scale if emulation else 1.0
        batch, micro, pace = plan.batches[place], plan.micro_batches[place], now.ranks[place]
        line = _line(pace.model, batch, micro)
        peak, known = peaks[place] if peaks else None, found.fixed_bytes
        per_sample = None if peak is None else max(0.0, peak - known) / min(batch, micro)
        codecs = {**(costs or {}), **found.costs}
        return cls(
            device=devices[place].name,
            emulated=now.emulated,
            amp=plan.amp[place],
            launch_s=line.launch_s / scale,
            sample_s=line.sample_s / scale,
            error=pace.error,
            optimizer_s=now.parts.optimizer_s,
            data_s=now.parts.data_s / batch,
            other_s=max(0.0, now.parts.other_s),
            sizes=pace.sizes,
            shapes=tuple(reversed(found.shapes)),
            element_bytes=found.element_bytes,
            fixed_bytes=None if peak is None else known,
            sample_bytes=per_sample,
            ready_shares=now.seen_shares,
            codec_element_s={
                text: cost.element_s for text, cost in codecs.items() if text != "none"
            },
            samples=plan.epoch_steps * plan.global_batch,
        )

    @property
    def compute(self) -> StepTime:
        """The device's compute time."""
        return StepTime(launch_s=self.launch_s, sample_s=self.sample_s)

    @property
    def memory(self) -> MemoryModel | None:
        """What a micro-batch holds; None where there is no reading."""
        if self.fixed_bytes is None or self.sample_bytes is None:
            return None
        return MemoryModel(fixed_bytes=self.fixed_bytes, sample_bytes=self.sample_bytes)

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Sizes of the gradient's tensors, in the model's order."""
        return tuple(math.prod(shape) * self.element_bytes for shape in self.shapes)

    @property
    def gradient_bytes(self) -> int:
        """Size of the whole gradient."""
        return sum(self.tensor_bytes)

    def to_json(self) -> str:
        """Returns the profile as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "TaskProfile":
        """Returns the profile that a JSON text holds.

        Raises:
            PlanError: It is no profile of this version, or a value is out of its range.
        """
        try:
            facts = json.loads(text)
            version = facts.pop("format", None)
            if version != FORMAT:
                raise ValueError(f"its format is {version!r}, and this hetkit reads {FORMAT}")
            return cls(**facts)
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                f"this is no profile of a task: {error}. Make one with hk.profile(task)."
            ) from error

    def save(self, path: str | Path) -> Path:
        """Writes the profile as a JSON file, and returns where."""
        target = Path(path)
        target.write_text(self.to_json(), encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | Path) -> "TaskProfile":
        """Returns what `save` wrote.

        Raises:
            PlanError: The file holds no profile.
            OSError: The file cannot be read.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def __repr__(self) -> str:
        return f"{self._title}\n{text_table(_HEADER, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), caption=self._title)

    @property
    def _title(self) -> str:
        mark = ", emulated" if self.emulated else ""
        return f"Profile of a task, measured on {self.device}{mark}, amp {self.amp}"

    def _rows(self) -> list[tuple[str, str]]:
        sizes = ", ".join(f"{size:g}" for size in self.sizes)
        per_sample = f"{self.sample_s * 1e3:.4g} ms ± {self.error:.1%}"
        return [
            ("compute per sample", per_sample),
            ("compute per micro-batch", f"{self.launch_s * 1e3:.4g} ms"),
            ("samples per pass measured", sizes),
            ("optimizer", f"{self.optimizer_s * 1e3:.4g} ms"),
            ("gradient", f"{show_memory(self.gradient_bytes)} in {len(self.shapes)} tensors"),
            ("memory, whatever the batch", show_memory(self.fixed_bytes)),
            ("memory per sample", show_memory(self.sample_bytes)),
            ("codecs tried", ", ".join(self.codec_element_s) or "–"),
        ]


_HEADER = ("measured", "figure")


def _line(model: ComputeTime, batch: int, micro_batch: int) -> StepTime:
    """Returns a model as a line; of a bent one, that through the present size."""
    if isinstance(model, StepTime):
        return model
    passes, whole_s = -(-batch // micro_batch), model.seconds(batch, micro_batch)
    sample_s = min(model.sample_s_at(batch, micro_batch), whole_s / batch)
    return StepTime(launch_s=(whole_s - sample_s * batch) / passes, sample_s=sample_s)
