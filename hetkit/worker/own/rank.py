"""A rank that runs the user's own loop: between its steps it obeys the coordinator's messages.

The user's function runs on the process's main thread, inside the handling of the message that made
the rank complete. Whenever it has used up its grants, it takes messages in from there::

    serve ─▶ Rendezvous ─▶ the user's loop ─▶ step 7 needs a grant ─▶ SetPlan, Grant ─┐
                                  ▲                                                   │
                                  └───────────────────────────────────────────────────┘

Nothing is read while there are granted steps left. So a message that comes after a grant is obeyed
after its steps, by all ranks at the same step, as with a `hetkit.Task`.
"""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetkit.devices.device import Device
from hetkit.errors import ProtocolError, TaskError
from hetkit.launch import messages as m
from hetkit.launch.channel import Link
from hetkit.launch.payload import load
from hetkit.plan import Plan
from hetkit.planning.batch_split import even_split
from hetkit.worker.checkpoint import read_state, write_state
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.emulated_link import link_of
from hetkit.worker.emulation import EmulatedMemory
from hetkit.worker.exchange import Exchange
from hetkit.worker.group import share_tensors
from hetkit.worker.hierarchy import Archipelago
from hetkit.worker.memory import MemoryMeter
from hetkit.worker.meter import Meter
from hetkit.worker.own.clock import OwnClock
from hetkit.worker.own.loop import Worker
from hetkit.worker.own.state import OwnState
from hetkit.worker.own.step import OwnStep
from hetkit.worker.own.training import OwnTraining, OwnView
from hetkit.worker.rank import Rank
from hetkit.worker.rank import run as run_rank
from hetkit.worker.switch import CodecSwitch

_log = logging.getLogger(__name__)


class LoopLeft(BaseException):
    """The session has been closed: unwinds the user's function, past its ``except Exception``."""


class OwnRank(Rank):
    """A rank whose training is a function of the user's.

    Args:
        link: The channel to the coordinator.
        generation: Which start of the session's workers this one belongs to.
        rank: Its rank.
    """

    def __init__(self, link: Link, generation: int, rank: int) -> None:
        super().__init__(link, generation, rank)
        self._function: Callable[[Worker], object] | None = None
        self._own: OwnTraining | None = None
        self._worker: Worker | None = None
        self._granted = 0
        self._end: m.EndEpoch | None = None
        self._until: Callable[[], bool] | None = None

    def serve(self, until: Callable[[], bool] | None = None) -> None:
        """Obeys messages until it is told to leave, or until ``until()`` says so.

        In the kernel's own process (``devices="inline"``) the user's function is on the caller's
        stack: it is unwound when the caller is to go on, and the next run starts it anew from the
        state that it had.
        """
        self._until = until
        super().serve(until)

    @property
    def _training(self) -> OwnTraining | None:
        return self._own

    # ── what the loop waits for ──

    def ready(self, samples: int, epochs: int) -> None:
        """Tells the coordinator what an epoch has, and how many there are."""
        join, own = self._joined(), self._at_work()
        emulation = join.devices[join.rank].emulation
        parameters = [p for model in own.state.models.values() for p in model.parameters()]
        self._granted = own.state.step
        self._link.send(
            m.Ready(
                rank=join.rank,
                generation=join.generation,
                samples=samples,
                step=own.state.step,
                epoch=own.state.epoch,
                epoch_first_step=own.state.epoch_first_step,
                epochs=epochs,
                parameters=sum(p.numel() for p in parameters),
                parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
                sample_s=emulation.sample_s if emulation else None,
                fixed_bytes=emulation.fixed_bytes if emulation else None,
                sample_bytes=emulation.sample_bytes if emulation else None,
            )
        )

    def await_step(self) -> Plan:
        """Waits until the next step is granted; returns the plan in force for it."""
        own = self._at_work()
        self._await(lambda: self._granted > own.state.step)
        while self._plans and self._plans[0].first_step <= own.state.step:
            own.apply(self._plans.popleft())
        self._die_if_emulated(own.state.step)
        if own.state.plan is None:
            raise ProtocolError("a step was granted before any plan was set")
        return own.state.plan

    def await_epoch_end(self) -> None:
        """Waits until the epoch may be closed, and closes it: shares buffers, saves, reports."""
        own = self._at_work()
        self._await(lambda: self._end is not None)
        end, plan = self._end, own.state.plan
        self._end = None
        if end is None or plan is None:
            raise ProtocolError("an epoch ended that had not begun")
        if plan.world_size > 1:
            busiest = plan.batches.index(max(plan.batches))
            for model in own.state.models.values():
                share_tensors(list(model.buffers()), busiest)
        own.state.end_epoch()
        if end.snapshot:
            state = own.state_dict()
            if self.rank == 0:
                write_state(Path(end.snapshot), state)
        self._link.send(
            m.EpochReport(
                rank=self.rank,
                generation=self.generation,
                epoch=end.epoch,
                metrics=self._worker.take_totals() if self._worker else {},
            )
        )

    def _await(self, come: Callable[[], bool]) -> None:
        if not come():
            self._rest()
        while not come():
            message = self._link.receive(0.05 if self._until else None)
            if message is not None:
                self._handle(message)
            elif self._until is None or self._until():
                self.unwound = True
            if self._left or self.unwound:
                self._leave()

    def _leave(self) -> None:
        raise LoopLeft

    # ── messages ──

    def _start(self, join: m.Join) -> None:
        self._join = join
        self._host_store(join)
        torch.set_num_threads(join.threads)
        torch.manual_seed(join.seed)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._function = self._load(join)
        if join.world_size == 1:
            self._assemble(None)

    def _load(self, join: m.Join) -> Callable[[Worker], object] | None:
        function: Callable[[Worker], object] = load(Path(join.payload))
        return function

    def _assemble(self, group: dist.ProcessGroup | None) -> None:
        self._worker = self._make_worker(group)
        if self._function is None:
            return
        try:
            self._function(self._worker)
            self.end_loop()
        except LoopLeft:
            _log.debug("rank %d: the loop was left at step %d", self.rank, self._at_work().step)

    def end_loop(self) -> None:
        """The user's code has come to its end: so must that of all ranks; tells the coordinator."""
        if self._worker is None:
            raise ProtocolError("a loop ended that had not begun")
        self._worker.finish()
        self._rest()
        self._link.send(
            m.Finished(rank=self.rank, generation=self.generation, step=self._at_work().step)
        )

    def _run(self, until: int) -> None:
        self._granted = until

    def _end_epoch(self, message: m.EndEpoch) -> None:
        self._end = message

    def _view(self) -> OwnView:
        join = self._joined()
        return OwnView(self._at_work(), rank=join.rank, world_size=join.world_size)

    # ── inside ──

    @property
    def _device(self) -> torch.device:
        join = self._joined()
        return torch.device(join.devices[join.rank].torch_device)

    def _at_work(self) -> OwnTraining:
        if self._own is None:
            raise ProtocolError("a message came before the rank was ready")
        return self._own

    def _make_worker(self, group: dist.ProcessGroup | None) -> Worker:
        join = self._joined()
        me = join.devices[join.rank]
        meter = Meter(self._send_rows)
        share = even_split(join.global_batch, join.world_size)[0]
        clock = OwnClock(me, join.rank, share)
        exchange = _exchange(join, me, group) if group is not None else None
        islands = Archipelago(join.devices, join.rank)
        switch = CodecSwitch(exchange, {}, join.rank, self._device, islands) if exchange else None
        memory = MemoryMeter(self._device, _memory(me))
        step = OwnStep(join.rank, self._device, meter, memory, exchange, switch, clock)
        snapshot = read_state(Path(join.snapshot)) if join.snapshot is not None else None
        if snapshot is not None and "models" not in snapshot:
            raise TaskError("the checkpoint is a Task's, not an own loop's: load it with its Task.")
        state = OwnState(step, snapshot)
        if switch is not None and snapshot is not None:
            switch.load_state_dict(snapshot.get("codec"))
        self._own = OwnTraining(state, step, exchange, switch, clock, self._device)
        return Worker(
            self,
            step,
            state,
            rank=join.rank,
            world_size=join.world_size,
            seed=join.seed,
            device=self._device,
        )

    def _die_if_emulated(self, step: int) -> None:
        join = self._joined()
        emulation = join.devices[join.rank].emulation
        if emulation is not None and emulation.dies_at_step == step:
            self._at_work().flush()
            os.kill(os.getpid(), signal.SIGKILL)


def _exchange(join: m.Join, me: Device, group: dist.ProcessGroup) -> Exchange:
    return Exchange(group, link_of(join.devices, me), make_codec("none"))


def _memory(me: Device) -> EmulatedMemory | None:
    """The emulated memory, as far as the emulation states it: an own loop cannot be probed."""
    emulation = me.emulation
    if emulation is None:
        return None
    return EmulatedMemory(me, emulation.fixed_bytes or 0.0, emulation.sample_bytes or 0.0)


def run(start: Any) -> None:
    """The worker's main for an own loop, after the nursery has forked it."""
    run_rank(start, OwnRank)
