"""Builds a rank: its model, data, clock and exchange, from the task and the Join message."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hetkit.devices.device import Device
from hetkit.errors import TaskError
from hetkit.launch.messages import Join
from hetkit.planning.batch_split import even_split
from hetkit.task import Task
from hetkit.worker.batchnorm import SharedStatistics, share_batchnorm
from hetkit.worker.checkpoint import read_state
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.data import Samples, open_training, open_validation, to_device
from hetkit.worker.emulated_link import link_of
from hetkit.worker.emulation import DeviceClock, EmulatedMemory
from hetkit.worker.exchange import Exchange
from hetkit.worker.hierarchy import Archipelago
from hetkit.worker.loop import TrainingLoop
from hetkit.worker.memory import MemoryMeter, training_bytes
from hetkit.worker.meter import Meter
from hetkit.worker.objective import Objective
from hetkit.worker.probe import Probe, probe
from hetkit.worker.switch import CodecSwitch

CALIBRATION_MARGIN = 4.0
"""An emulated device is at least this many times slower than the real compute behind it."""

SHORTEST_STEP_S = 0.04
"""Shortest calibrated step per rank at the even split: gloo itself costs milliseconds a rank."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What can be built without the other ranks."""

    task: Task
    model: torch.nn.Module
    samples: Samples
    validation: Samples | None
    device: torch.device
    probe: Probe
    fixed_bytes: float
    statistics: SharedStatistics | None


def build_parts(join: Join, task: Task) -> Parts:
    """Builds the model under the session's seed, opens the data, and probes the task."""
    me = join.devices[join.rank]
    device = torch.device(me.torch_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(join.threads)
    torch.manual_seed(join.seed)
    model = task.model if isinstance(task.model, torch.nn.Module) else task.model()
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"model() returned {type(model).__name__}, not a torch.nn.Module.")
    model = model.to(device)
    statistics = share_batchnorm(model) if task.sync_batchnorm else None
    samples = open_training(task, join.seed)
    validation = open_validation(task, join.seed)
    share = even_split(join.global_batch, join.world_size)[join.rank]
    calibrates = me.emulation is not None and me.emulation.sample_s is None
    found = probe(
        task,
        model,
        samples,
        size=share if calibrates else 2,
        device=device,
        repeats=3 * calibrates,
        statistics=statistics,
    )
    fixed_bytes = training_bytes(task, model) if me.emulated else 0.0
    return Parts(
        task=task,
        model=model,
        samples=samples,
        validation=validation,
        device=device,
        probe=found,
        fixed_bytes=fixed_bytes,
        statistics=statistics,
    )


def assemble(
    join: Join,
    parts: Parts,
    meter: Meter,
    group: dist.ProcessGroup | None,
    on_cap: Callable[[int, int | None, bool], None],
) -> tuple[TrainingLoop, Device]:
    """Puts the training loop together once the process group stands.

    Returns:
        The loop, and this rank's device with what was calibrated filled in.
    """
    me = calibrated(join, parts, group)
    clock, memory = _emulated(me, join.rank)
    exchange = switch = None
    if group is not None:
        ready = clock.backward_done if clock else meter.handed_over
        exchange = Exchange(group, link_of(join.devices, me), make_codec("none"), ready)
        islands = Archipelago(join.devices, join.rank)
        switch = CodecSwitch(exchange, parts.task.codecs, join.rank, parts.device, islands)
    loop = TrainingLoop(
        parts.task,
        _objective(parts, group, clock),
        parts.samples,
        rank=join.rank,
        seed=join.seed,
        device=parts.device,
        meter=meter,
        memory=MemoryMeter(parts.device, memory),
        exchange=exchange,
        switch=switch,
        clock=clock,
        counted=parts.probe.counted,
        on_cap=on_cap,
    )
    if join.snapshot is not None:
        loop.load_state_dict(read_state(Path(join.snapshot)))
    loop.order.take(loop.epoch)  # only what was drawn tells how many samples an epoch has
    return loop, me


def _objective(
    parts: Parts, group: dist.ProcessGroup | None, clock: DeviceClock | None
) -> Objective:
    task, found = parts.task, parts.probe
    trained = {name: p for name, p in parts.model.named_parameters() if p.requires_grad}
    statistics = stand_in = None
    if group is not None and parts.statistics is not None:
        statistics = parts.statistics
        statistics.join(dist.new_group(), None if clock is None else clock.excuse)
        some = range(min(2, len(parts.samples)))
        stand_in = to_device(parts.samples.fetch(some), parts.device)
    varying = task.find_unused_parameters
    return Objective(
        parts.model,
        task.loss,
        {name: p for name, p in trained.items() if name not in found.unused},
        varying=bool(found.unused) if varying is None else varying,
        statistics=statistics,
        stand_in=stand_in,
    )


def calibrated(join: Join, parts: Parts, group: dist.ProcessGroup | None) -> Device:
    """Returns this rank's device with everything measured that its emulation left open.

    The pace-1 time per sample is agreed by all ranks: the largest of (real seconds × pace), with a
    margin, so that no rank's real compute comes near what it emulates; and long enough that the
    step at the even split stays well above what gloo itself costs.
    """
    me = join.devices[join.rank]
    if me.emulation is None:
        return me
    emulation = me.emulation
    if emulation.sample_s is None:
        slowest = torch.tensor([parts.probe.sample_s * emulation.pace], dtype=torch.float64)
        if group is not None:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        share = even_split(join.global_batch, join.world_size)[0]
        shortest = SHORTEST_STEP_S * join.world_size / share
        sample_s = max(CALIBRATION_MARGIN * float(slowest.item()), shortest)
        emulation = replace(emulation, sample_s=sample_s / emulation.time_scale)
    if emulation.fixed_bytes is None:
        emulation = replace(emulation, fixed_bytes=int(parts.fixed_bytes))
    if emulation.sample_bytes is None:
        emulation = replace(emulation, sample_bytes=parts.probe.sample_bytes)
    return replace(me, emulation=emulation)


def _emulated(me: Device, rank: int) -> tuple[DeviceClock | None, EmulatedMemory | None]:
    emulation = me.emulation
    if emulation is None:
        return None, None
    return (
        DeviceClock(emulation, emulation.sample_s or 0.0, rank),
        EmulatedMemory(me, emulation.fixed_bytes or 0.0, emulation.sample_bytes or 0.0),
    )
