r"""What a fleet that one does not have would do with a task that was profiled on one device.

What each device computes follows from the profile and its `hetkit.planning.relative_speed`; the
fixed cost of a pass is the host's, and is taken as it was measured. The batch is split by the
balancer's own search within what the memory holds, and the buckets are queued on the stated link
(`hetkit.planning.exposure`). A step is shorter when any device is faster, however it is split, so
all devices at their most and all at their least bound it; the profile's own error is added to both
ends, ± 1.96 standard errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetkit.devices.device import Device
from hetkit.devices.fleet import Fleet, emulate
from hetkit.devices.table import html_table, text_table
from hetkit.devices.units import show_memory
from hetkit.errors import PlanError
from hetkit.planning.batch_split import split_batch
from hetkit.planning.codec_bytes import wire_bytes
from hetkit.planning.exchange_time import exchange_seconds
from hetkit.planning.exposure import expose, pack_buckets, ready_shares
from hetkit.planning.memory import largest_micro_batch
from hetkit.planning.relative_speed import Speed, relative_speed
from hetkit.planning.schedule import resolve_amp, resolve_islands
from hetkit.planning.step_time import ComputeTime, StepTime
from hetkit.planning.task_profile import Shape, TaskProfile
from hetkit.planning.verdict import Verdict, judge
from hetkit.planning.what_if import LIKELY
from hetkit.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """What a fleet is predicted to do with a task; nothing in it was measured there.

    Args:
        profile: What was measured of the task, and on what.
        fleet: The devices.
        global_batch: Samples in a step.
        batches, micro_batches, amp: Samples per rank, largest pass, precision, in rank order.
        compression: The gradient codec's text.
        speeds: How fast each device is taken to be.
        compute_s: Data and compute of the slowest rank, in seconds.
        exposed_s: Exchange that holds the step up.
        step_s: The whole step.
        low_s, high_s: The ends of what is to be expected.
        memory_bytes: Peak of each device; None where the profile has no reading.
        verdict: All devices, the best subset, or the fastest alone.
        notes: What the figures leave out.

    Example:
        >>> profile = TaskProfile(device="A100", amp="off", launch_s=0.01, sample_s=0.002,
        ...                       sizes=(8.0, 32.0), shapes=((1024, 1024), (1024,)))
        >>> plan = plan_fleet(profile, "1xA100 + 1xV100", global_batch=64, link="2GB/s")
        >>> plan.batches, plan.low_s < plan.step_s < plan.high_s
        ((38, 26), True)
    """

    profile: TaskProfile
    fleet: Fleet
    global_batch: int
    batches: tuple[int, ...]
    micro_batches: tuple[int, ...]
    amp: tuple[str, ...]
    compression: str
    speeds: tuple[Speed, ...]
    compute_s: float
    exposed_s: float
    step_s: float
    low_s: float
    high_s: float
    memory_bytes: tuple[float | None, ...]
    verdict: Verdict
    notes: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """The predicted throughput."""
        return self.global_batch / self.step_s

    @property
    def text(self) -> str:
        """The prediction in one sentence."""
        share = self.exposed_s / self.step_s
        low, high = (self.global_batch / each for each in (self.high_s, self.low_s))
        return (
            f"predicted: a step of {self.step_s * 1e3:,.1f} ms ({self.low_s * 1e3:,.1f} to "
            f"{self.high_s * 1e3:,.1f}), {self.samples_per_s:,.0f} samples/s ({low:,.0f} to "
            f"{high:,.0f}), {share:.0%} of it exchange that holds the step up."
        )

    def __repr__(self) -> str:
        lines = [self._title, text_table(_HEADER, self._rows()), self.text, self.verdict.text]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        below = " · ".join([self.text, self.verdict.text, *self.notes])
        return html_table(_HEADER, self._rows(), caption=f"{self._title} · {below}")

    @property
    def _title(self) -> str:
        mark = ", emulated" if self.profile.emulated else ""
        return (
            f"Plan for {len(self.fleet)} devices, predicted from a profile on "
            f"{self.profile.device}{mark}; global batch {self.global_batch}, compression "
            f"{self.compression}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows = zip(self.fleet, self.speeds, self.batches, self.micro_batches, self.amp, strict=True)
        return [
            (
                device.label,
                f"{speed.likely:.2f}× ({speed.least:.2f} to {speed.most:.2f})",
                str(batch),
                str(min(batch, micro)),
                amp,
                f"{show_memory(used)} of {show_memory(device.memory_bytes)}",
            )
            for (device, speed, batch, micro, amp), used in zip(
                rows, self.memory_bytes, strict=True
            )
        ]


_HEADER = ("device", "speed (predicted)", "samples", "micro-batch", "amp", "memory")


def plan_fleet(
    profile: TaskProfile,
    devices: str | Fleet,
    *,
    global_batch: int,
    link: object = None,
    pace: Mapping[str, float] | None = None,
    **settings: object,
) -> FleetPlan:
    """Returns what a fleet would do with a task, from the catalogue and the task's profile.

    Args:
        profile: What was measured of the task on one device.
        devices: Such as ``"2xA100 + 4xV100"``; or a fleet of `hetkit.emulate`, with its links.
        global_batch: Samples in a step.
        link: The links, as in `hetkit.emulate`. Default: no latency and no limit, which the notes
            say.
        pace: Speed of devices relative to the profiled one, by name or label, where you know it:
            it wins over the catalogue, and counts as sure.
        **settings: ``amp``, ``compression``, ``micro_batch``, ``hierarchy`` or ``bucket_bytes`` of
            `hetkit.Settings`.

    Returns:
        The plan; prints as a table, and shows as one in a notebook.

    Raises:
        SettingsError: A setting is unknown, out of its range, or a device lacks the precision.
        DeviceError: A device's figures are not known; or the profiled one's, which ``pace`` mends.
        PlanError: Not even one sample fits into a device.
    """
    fleet = devices if isinstance(devices, Fleet) else _build(devices, link, pace)
    wanted = Settings(global_batch=global_batch).change(**settings)
    amp = resolve_amp(wanted, fleet)
    speeds = tuple(
        relative_speed(profile, device, precision, pace or {})
        for device, precision in zip(fleet, amp, strict=True)
    )
    micro_batches = tuple(_largest_pass(profile, device, wanted) for device in fleet)
    steps = _Steps(profile, fleet, wanted, micro_batches)
    likely, most, least = (
        steps.of([getattr(speed, name) for speed in speeds]) for name in ("likely", "most", "least")
    )
    spare = LIKELY * profile.error
    memory, ranks = profile.memory, range(len(fleet))
    return FleetPlan(
        profile=profile,
        fleet=fleet,
        global_batch=global_batch,
        batches=likely.batches,
        micro_batches=micro_batches,
        amp=amp,
        compression=wanted.compression,
        speeds=speeds,
        compute_s=likely.compute_s,
        exposed_s=likely.exposed_s,
        step_s=likely.step_s,
        low_s=most.step_s - spare * most.compute_s,
        high_s=least.step_s + spare * least.compute_s,
        memory_bytes=tuple(
            memory.bytes(min(likely.batches[rank], micro_batches[rank])) if memory else None
            for rank in ranks
        ),
        verdict=steps.verdict([speed.likely for speed in speeds]),
        notes=_notes(profile, fleet, wanted, speeds, link),
    )


def _build(spec: str, link: object, pace: Mapping[str, float] | None) -> Fleet:
    # The emulation's own pace is not used here; a name that is in no catalogue needs one.
    return emulate(spec, link=link, pace=pace)


def _largest_pass(profile: TaskProfile, device: Device, wanted: Settings) -> int:
    largest = wanted.micro_batch or wanted.global_batch
    if profile.memory is None or device.memory_bytes is None:
        return largest
    try:
        return min(largest, largest_micro_batch(profile.memory, device.memory_bytes))
    except PlanError as error:
        raise PlanError(f"{device.label}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Step:
    batches: tuple[int, ...]
    compute_s: float
    exposed_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of one fleet and task at different speeds of its devices."""

    profile: TaskProfile
    fleet: Fleet
    wanted: Settings
    micro_batches: tuple[int, ...]

    def of(self, speeds: Sequence[float]) -> _Step:
        """Returns the step of the best split at these speeds."""
        models = self._models(speeds)
        batches = split_batch(
            models,
            self.wanted.global_batch,
            micro_batches=self.micro_batches,
            floors=[1] * len(models),
        )
        rows = list(zip(models, batches, self.micro_batches, strict=True))
        busy_s = max(model.seconds(batch, micro) for model, batch, micro in rows)
        buckets = self._buckets()
        shares = ready_shares([size for size, _ in buckets], self.profile.ready_shares)
        ready = [_ready(*row, shares) for row in rows]
        codec_s, transfer_s = self._exchange(self.fleet.devices, buckets)
        exposed_s = expose(ready, codec_s, transfer_s).seconds if transfer_s else 0.0
        return _Step(batches, busy_s, exposed_s, busy_s + exposed_s + self._rest_s)

    def verdict(self, speeds: Sequence[float]) -> Verdict:
        """Compares sets of the devices; their exchange is the whole fleet's, by its ranks."""
        buckets, devices = self._buckets(), self.fleet.devices
        exposed = self.of(speeds).exposed_s

        def exchange_s(ranks: int) -> float:
            whole = sum(self._exchange(devices, buckets)[1])
            part = sum(self._exchange(devices[:ranks], buckets)[1])
            return exposed * part / whole if whole else exposed

        return judge(
            self.fleet.labels,
            self._models(speeds),
            self.wanted.global_batch,
            micro_batches=self.micro_batches,
            comm_s=exchange_s,
            rest_s=self._rest_s,
            emulated=self.profile.emulated,
            error=self.profile.error,
            source=f"a profile on {self.profile.device}",
        )

    def _models(self, speeds: Sequence[float]) -> list[ComputeTime]:
        """Returns the time of each device's samples: fetching them is the host's, at its pace."""
        profile = self.profile
        return [
            StepTime(launch_s=profile.launch_s, sample_s=profile.sample_s / speed + profile.data_s)
            for speed in speeds
        ]

    @property
    def _rest_s(self) -> float:
        return self.profile.optimizer_s + self.profile.other_s

    def _buckets(self) -> list[tuple[float, list[Shape]]]:
        """Returns size and shapes of each bucket; gradients are ready last tensor first."""
        shapes, place = tuple(reversed(self.profile.shapes)), 0
        tensors = tuple(reversed(self.profile.tensor_bytes))
        buckets: list[tuple[float, list[Shape]]] = []
        for size in pack_buckets(tensors, self.wanted.bucket_bytes):
            inside, filled = place, 0.0
            while filled < size:
                filled, place = filled + tensors[place], place + 1
            buckets.append((size, list(shapes[inside:place])))
        return buckets

    def _exchange(
        self, devices: Sequence[Device], buckets: Sequence[tuple[float, list[Shape]]]
    ) -> tuple[list[float], list[float]]:
        """Returns codec and wire seconds of each bucket."""
        profile, text = self.profile, self.wanted.compression
        element_s = profile.codec_element_s.get(text, 0.0)
        whole = len(devices) == len(self.fleet)
        islands = resolve_islands(self.wanted, devices) if whole else ()
        world_size = len(islands) or len(devices)
        transfers: list[float] = []
        for size, shapes in buckets if len(devices) > 1 else ():
            sent = wire_bytes(text, shapes, profile.element_bytes, world_size)
            seconds = exchange_seconds(devices, size, islands=islands, sent_bytes=sent)
            transfers.append(seconds or 0.0)
        codecs = [size / profile.element_bytes * element_s for size, _ in buckets]
        return codecs, transfers


def _ready(model: ComputeTime, batch: int, micro: int, shares: Sequence[float]) -> list[float]:
    """Returns when a rank has its buckets ready: in the last of its even passes."""
    whole_s, passes = model.seconds(batch, micro), max(1, -(-batch // micro))
    return [whole_s * (passes - 1 + share) / passes for share in shares]


def _notes(
    profile: TaskProfile, fleet: Fleet, wanted: Settings, speeds: Sequence[Speed], link: object
) -> tuple[str, ...]:
    notes = []
    if any(speed.least < speed.most for speed in speeds):
        notes.append(
            "speeds are ratios of published peaks, which are a poor prior: profile one card of "
            "each kind, and give pace=… for a narrower interval."
        )
    emulation = fleet[0].emulation
    if len(fleet) > 1 and link is None and emulation and emulation.inter_link.bytes_per_s > 1e15:
        notes.append("no link was given, so the exchange counts as free: give link='2GB/s'.")
    if len(fleet) > 1 and wanted.compression not in ("none", *profile.codec_element_s):
        notes.append(f"what {wanted.compression} itself computes was not measured: left out.")
    if profile.memory is None:
        notes.append("the profile has no memory readings: whether it fits is not known.")
    if len(profile.sizes) < 2:
        notes.append("one pass size was measured: the fixed cost of a pass is not known.")
    return tuple(notes)
