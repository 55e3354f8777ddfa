"""A rank: serves the coordinator's messages, in order, on the process's main thread.

Plans and grants come to every rank in the same order and are obeyed one after the other, so all
ranks stand at the same step whenever they wait. What can fail inside is the user's code or a peer:
either is reported once, and then the rank waits to be ended.
"""

import functools
import logging
import os
import platform
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hetkit.errors import ProtocolError
from hetkit.launch import messages as m
from hetkit.launch.channel import Link
from hetkit.launch.payload import dump_bytes, load, load_bytes
from hetkit.plan import Plan
from hetkit.worker.build import Parts, assemble, build_parts
from hetkit.worker.checkpoint import write_state
from hetkit.worker.evaluation import evaluate
from hetkit.worker.failure import describe, pickled
from hetkit.worker.group import (
    LOOPBACK,
    host_store,
    is_peer_loss,
    join_group,
    join_store,
    leave_group,
)
from hetkit.worker.loop import TrainingLoop
from hetkit.worker.meter import Meter, device_event

_log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 1800.0


class Training(Protocol):
    """What a rank needs of its training, whoever wrote the loop."""

    @property
    def step(self) -> int:
        """The next step."""

    @property
    def exchange_failed(self) -> bool:
        """Whether the exchange failed because another rank is gone or has given up."""

    @property
    def outpaced(self) -> bool:
        """Whether this machine computes slower than the device that it emulates."""

    def flush(self) -> None:
        """Sends the account of the finished steps."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: call it on all ranks, at the same step."""

    def take_notices(self) -> list[str]:
        """Returns what a person should know of the exchange, once."""

    def close(self) -> None:
        """Ends the exchange's thread."""


class Rank:
    """One rank of a session, from its first message to its last.

    Args:
        link: The channel to the coordinator.
        generation: Which start of the session's workers this one belongs to.
        rank: Its rank.

    Attributes:
        unwound: Whether the training had to be taken from the stack and cannot go on as it is.
    """

    def __init__(self, link: Link, generation: int, rank: int) -> None:
        self.unwound = False
        self.rank = rank
        self._link = link
        self.generation = generation
        self._join: m.Join | None = None
        self._parts: Parts | None = None
        self._loop: TrainingLoop | None = None
        self._store: TCPStore | None = None
        self._plans: deque[Plan] = deque()
        self._left = False
        self._told_outpaced = False

    def hello(self) -> None:
        """Tells the coordinator that this worker has connected."""
        self._link.send(
            m.Hello(
                rank=self.rank,
                generation=self.generation,
                pid=os.getpid(),
                torch_version=str(torch.__version__),
                python_version=platform.python_version(),
            )
        )

    def serve(self, until: Callable[[], bool] | None = None) -> None:
        """Obeys messages until it is told to leave, or until ``until()`` says so.

        An exception is reported to the coordinator and raised.
        """
        while not self._left:
            message = self._link.receive(0.05 if until else None)
            if message is None:
                if until is not None and until():
                    return
                continue
            try:
                self._handle(message)
            except BaseException as error:
                self._report(error)
                raise

    def close(self) -> None:
        """Ends the exchange, then the process group: no thread may wait inside gloo at exit."""
        if self._training is not None:
            self._training.close()
        leave_group()

    @property
    def _training(self) -> "Training | None":
        return self._loop

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.Join():
                self._start(message)
            case m.Rendezvous():
                self._meet(message)
            case m.SetPlan(plan=plan):
                self._plans.append(plan)
            case m.Grant(until=until):
                self._run(until)
            case m.EndEpoch():
                self._end_epoch(message)
            case m.SaveState():
                self._save(message)
            case m.Call():
                self._call(message)
            case m.Leave():
                self._left = True
            case _:
                raise ProtocolError(f"a worker cannot handle {type(message).__name__}")

    def _start(self, join: m.Join) -> None:
        self._join = join
        self._host_store(join)
        self._parts = build_parts(join, load(Path(join.payload)))
        if join.world_size == 1:
            self._assemble(None)

    def _host_store(self, join: m.Join) -> None:
        if join.world_size > 1 and join.rank == 0:
            self._store = host_store()
            self._link.send(m.StoreReady(generation=join.generation, port=self._store.port))

    def _meet(self, where: m.Rendezvous) -> None:
        join = self._joined()
        store = self._store or join_store(LOOPBACK, where.port, JOIN_TIMEOUT_S)
        group = join_group(
            store,
            backend=join.backend,
            rank=join.rank,
            world_size=join.world_size,
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )
        self._assemble(group)

    def _assemble(self, group: dist.ProcessGroup | None) -> None:
        join, parts = self._joined(), self._built()
        meter = Meter(self._send_rows, device_event(parts.device))
        self._loop, me = assemble(join, parts, meter, group, self._tell_cap)
        emulation = me.emulation
        if parts.probe.unused and join.rank == 0:
            self._notice(
                "warning",
                "the loss of the first samples gives these parameters no gradient; they stay as "
                "they are in each step that gives them none: " + ", ".join(parts.probe.unused),
            )
        self._link.send(
            m.Ready(
                rank=join.rank,
                generation=join.generation,
                samples=len(self._loop.order),
                validation_samples=len(parts.validation) if parts.validation else 0,
                step=self._loop.step,
                epoch=self._loop.epoch,
                epoch_first_step=self._loop.epoch_first_step,
                parameters=sum(p.numel() for p in parts.model.parameters()),
                parameter_bytes=sum(p.numel() * p.element_size() for p in parts.model.parameters()),
                sample_s=emulation.sample_s if emulation else None,
                fixed_bytes=emulation.fixed_bytes if emulation else None,
                sample_bytes=emulation.sample_bytes if emulation else None,
                bf16=_has_bf16(parts.device),
            )
        )

    def _run(self, until: int) -> None:
        loop = self._running()
        join = self._joined()
        emulation = join.devices[join.rank].emulation
        while loop.step < until:
            while self._plans and self._plans[0].first_step <= loop.step:
                loop.apply(self._plans.popleft())
            if emulation is not None and emulation.dies_at_step == loop.step:
                loop.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            loop.run_step()
        self._rest()

    def _rest(self) -> None:
        """All that was granted is done: sends what was measured, before it waits."""
        training, join = self._training, self._joined()
        if training is None:
            return
        training.flush()
        for text in training.take_notices():
            if self.rank == 0:
                self._notice("warning", text)
        if training.outpaced and not self._told_outpaced:
            self._told_outpaced = True
            self._notice(
                "warning",
                f"this machine is slower than the emulated {join.devices[join.rank].label}: its "
                "compute times are the machine's own. Give a larger sample_s or time_scale.",
            )

    def _end_epoch(self, message: m.EndEpoch) -> None:
        loop = self._running()
        plan = loop.plan
        loop.end_epoch()
        metrics, seconds = self._validate(plan) if plan is not None else ({}, 0.0)
        state = loop.state_dict()
        if self.rank == 0:
            write_state(Path(message.snapshot), state)
        self._link.send(
            m.EpochReport(
                rank=self.rank,
                generation=self.generation,
                epoch=message.epoch,
                metrics=metrics,
                validate_s=seconds,
            )
        )

    def _validate(self, plan: Plan) -> tuple[dict[str, tuple[float, float]], float]:
        parts, average = self._built(), self._running().update.average
        if parts.validation is None:
            return {}, 0.0
        measure = functools.partial(
            evaluate,
            parts.task,
            parts.model,
            parts.validation,
            rank=self.rank,
            batches=plan.batches,
            micro_batch=plan.micro_batches[self.rank],
            device=parts.device,
        )
        metrics, seconds = measure()
        if average is not None:
            with average.in_place():
                averaged, more_s = measure()
            metrics |= {f"ema_{name}": sums for name, sums in averaged.items()}
            seconds += more_s
        return metrics, seconds

    def _save(self, message: m.SaveState) -> None:
        training = self._training
        if training is None:
            raise ProtocolError("a message came before the rank was ready")
        state = training.state_dict()
        if self.rank == 0:
            write_state(Path(message.path), state)
            saved = m.Saved(path=message.path, call_id=message.call_id, step=training.step)
            self._link.send(saved)

    def _call(self, message: m.Call) -> None:
        try:
            function = load_bytes(message.pickled)
            answer = dump_bytes(function(self._view()))
            ok = True
        except Exception as error:  # noqa: BLE001 - the caller in the notebook gets it
            answer, ok = pickled(error), False
        self._link.send(m.Answer(call_id=message.call_id, rank=self.rank, ok=ok, pickled=answer))

    def _view(self) -> Any:
        return WorkerView(self)

    def _send_rows(self, rows: list[m.StepRow]) -> None:
        self._link.send(m.Progress(rank=self.rank, generation=self.generation, rows=tuple(rows)))

    def _tell_cap(self, micro_batch: int, tried: int | None, lost: bool) -> None:
        self._link.send(
            m.MemoryCap(
                rank=self.rank,
                generation=self.generation,
                step=self._running().step,
                micro_batch=micro_batch,
                tried=tried,
                lost=lost,
            )
        )

    def _notice(self, level: str, text: str) -> None:
        step = self._training.step if self._training else 0
        self._link.send(
            m.Notice(rank=self.rank, generation=self.generation, step=step, level=level, text=text)
        )

    def _report(self, error: BaseException) -> None:
        training = self._training
        if training is not None:
            training.flush()
        lost = is_peer_loss(error) or (training is not None and training.exchange_failed)
        _log.debug("rank %d failed", self.rank, exc_info=error)
        step = training.step if training else -1
        self._link.send(describe(error, self.rank, self.generation, step, victim=lost))

    def _joined(self) -> m.Join:
        if self._join is None:
            raise ProtocolError("a message came before Join")
        return self._join

    def _built(self) -> Parts:
        if self._parts is None:
            raise ProtocolError("a message came before Join")
        return self._parts

    def _running(self) -> TrainingLoop:
        if self._loop is None:
            raise ProtocolError("a message came before the rank was ready")
        return self._loop


class WorkerView:
    """What a function given to ``session.call`` sees of its rank.

    Attributes:
        rank, world_size: The rank and their number.
        device: The torch device.
        model, optimizer: The rank's own, between two steps.
        step, epoch: The next step, and its epoch.
        loss_scale: What fp16 ranks multiply their loss by; the same on all ranks.
        codec: How gradients travel; None for a single rank.
    """

    def __init__(self, rank: Rank) -> None:
        loop, join, parts = rank._running(), rank._joined(), rank._built()
        self.rank = join.rank
        self.world_size = join.world_size
        self.device = parts.device
        self.model = loop.model
        self.optimizer = loop.update.optimizer
        self.step = loop.step
        self.epoch = loop.epoch
        self.loss_scale = loop.update.loss_scale.scale
        self.codec = loop.codec


def _has_bf16(device: torch.device) -> bool:
    # is_bf16_supported() also answers True for emulation: ask for the capability.
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def run(start: Any, kind: type[Rank] = Rank) -> None:
    """The worker's main, after the nursery has forked it; ``kind`` is the rank it becomes."""
    from hetkit.launch.channel import ZmqLink

    link = ZmqLink(start.endpoint, start.keys, start.peer)
    rank = kind(link, start.peer.generation, start.peer.rank)
    try:
        rank.hello()
        rank.serve()
        rank.close()
    finally:
        link.close()
