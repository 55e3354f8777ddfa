"""The crew: one session's workers, from their fork to the process group, and their end.

A *generation* is one start of all ranks. After a death or a changed task the next generation is
forked anew, which the nursery makes cheap; messages of earlier generations are ignored.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetkit.devices.device import Device
from hetkit.errors import LaunchError
from hetkit.launch import messages as m
from hetkit.launch.channel import Hub, Peer, ZmqHub, memory_channel
from hetkit.launch.local import Nursery
from hetkit.launch.memory import MemoryLink
from hetkit.launch.orders import Event, WorkerStart
from hetkit.launch.torchrun import Gathering
from hetkit.planning.islands import common_backend

Incoming = tuple[Peer, m.Message] | Event
"""What a crew tells its coordinator: a worker's message, or a nursery's event."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a generation of workers is started for.

    Args:
        devices: What runs the ranks, in rank order.
        payload: The task's file.
        seed: The session's seed.
        global_batch: Samples in a step, for the probe's size.
        preload: Modules that the nursery should import once.
        snapshot: The training state to go on from; None for a fresh start.
        entry: What a worker runs, as ``module:name``.
    """

    devices: tuple[Device, ...]
    payload: Path
    seed: int
    global_batch: int
    preload: tuple[str, ...] = ()
    snapshot: Path | None = None
    entry: str = "hetkit.worker.rank:run"

    @property
    def backend(self) -> str:
        """``"nccl"`` where every rank is on its own card of one vendor, else ``"gloo"``."""
        return common_backend(self.devices) if len(self.devices) > 1 else "gloo"


class Crew:
    """The workers of one session.

    Args:
        name: The session's name, by which the nursery tells its workers from another's.
        folder: The session's private folder.
        deliver: Takes what the workers and the nursery say; called from other threads.
        nursery: Returns what forks the workers; None for one rank in this very process.
        forks: Whether the workers' processes are the crew's own, to start and to wait for.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        deliver: Callable[[Incoming], None],
        nursery: "Callable[[], Nursery | Gathering] | None",
        *,
        forks: bool = True,
    ) -> None:
        self.generation = 0
        self.forks = forks and nursery is not None
        self.link: MemoryLink | None = None
        self._name = name
        self._folder = folder
        self._nursery = nursery
        self._forked_by: Nursery | Gathering | None = None
        self._deliver = deliver
        self._job: Job | None = None
        self._ready: dict[int, m.Ready] = {}
        self._here: set[int] = set()
        self._where: m.Rendezvous | None = None
        self._zmq_hub: ZmqHub | None = None
        self._hub: Hub | None = None

    def start(self, job: Job) -> None:
        """Starts the next generation; `hear` tells when it stands."""
        self.generation += 1
        self._job = job
        self._ready = {}
        self._here = set()
        self._where = None
        if self._nursery is None:
            self._start_inline()
            return
        if self._zmq_hub is None:
            self._hub = self._zmq_hub = ZmqHub(
                lambda peer, message: self._deliver((peer, message)), self._folder
            )
        self._forked_by = self._nursery()
        for rank in range(len(job.devices)):
            start = WorkerStart(
                session=self._name,
                peer=Peer(self.generation, rank),
                endpoint=self._zmq_hub.endpoint,
                keys=self._zmq_hub.keys,
                folder=str(self._folder),
                preload=job.preload,
                env=self._environment(),
                entry=job.entry,
            )
            self._forked_by.fork(start, self._deliver)

    def hear(self, peer: Peer, message: m.Message) -> tuple[m.Ready, ...] | None:
        """Takes a message of the start; returns all ranks' `Ready` once the last has come.

        Raises:
            LaunchError: A worker speaks another version of the messages.
        """
        match message:
            case m.Hello():
                if message.protocol != m.PROTOCOL:
                    raise LaunchError(
                        f"rank {message.rank} speaks version {message.protocol} of hetkit's "
                        f"messages, this is version {m.PROTOCOL}: install the same hetkit."
                    )
                self._here.add(peer.rank)
                self._send(peer.rank, self._join(peer.rank))
                if self._where is not None:
                    self._send(peer.rank, self._where)
            case m.StoreReady(port=port):
                # Whoever has not connected yet is told after its Join: a hub reaches only the
                # connected.
                where = m.Rendezvous(generation=self.generation, host="127.0.0.1", port=port)
                self._where = where
                for rank in self._here:
                    self._send(rank, where)
            case m.Ready():
                self._ready[message.rank] = message
                if len(self._ready) == len(self._devices()):
                    return tuple(self._ready[rank] for rank in sorted(self._ready))
        return None

    @property
    def all_here(self) -> bool:
        """Whether every worker's process has connected; it builds the user's task next."""
        return len(self._here) == len(self._devices())

    def tell(self, message: m.Message) -> None:
        """Sends a message to every rank."""
        for rank in range(len(self._devices())):
            self._send(rank, message)

    def tell_rank(self, rank: int, message: m.Message) -> None:
        """Sends a message to one rank."""
        self._send(rank, message)

    def kill(self) -> None:
        """Ends all workers of the session at once, with their children."""
        if self._forked_by is not None and self._forked_by.alive:
            self._forked_by.kill(self._name, None)

    def close(self) -> None:
        """Closes the channel."""
        if self._hub is not None:
            self._hub.close()
            self._hub = self._zmq_hub = None

    def _start_inline(self) -> None:
        if self._hub is not None:
            self._hub.close()
        self._hub, self.link = memory_channel(
            lambda peer, message: self._deliver((peer, message)), Peer(self.generation, 0)
        )

    def _join(self, rank: int) -> m.Join:
        job = self._current_job()
        return m.Join(
            rank=rank,
            world_size=len(job.devices),
            generation=self.generation,
            backend=job.backend,
            devices=job.devices,
            payload=str(job.payload),
            seed=job.seed,
            global_batch=job.global_batch,
            threads=self._threads(),
            snapshot=str(job.snapshot) if job.snapshot else None,
        )

    def _environment(self) -> dict[str, str]:
        # By itself CUDA counts unlike cards fastest first, NVML by their slots: make both agree.
        return {
            "OMP_NUM_THREADS": str(self._threads()),
            "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        }

    def _threads(self) -> int:
        # One thread per rank where there are more ranks than cores: anything else slows all.
        return max(1, len(os.sched_getaffinity(0)) // len(self._devices()))

    def _devices(self) -> Sequence[Device]:
        return self._current_job().devices

    def _current_job(self) -> Job:
        if self._job is None:
            raise LaunchError("the crew was not started yet")
        return self._job

    def _send(self, rank: int, message: m.Message) -> None:
        if self._hub is not None:
            self._hub.send(Peer(self.generation, rank), message)
