"""Script: a training loop of one's own as a program, under ``torchrun`` or alone.

::

    torchrun --nproc_per_node 2 train.py

    rank 0   the script · coordinator's thread ◀── the same messages ──▶ every rank's script
             ledger, history                       (ZeroMQ with CURVE keys, one host)

Nothing is forked: the processes are torchrun's. Plans, grants, telemetry and the laws are those of
a session. When a rank raises, the others are told to leave, and torchrun ends what stays.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetkit.coordinator import Coordinator
from hetkit.devices.busy import claim
from hetkit.devices.fleet import Fleet, parse_fleet
from hetkit.devices.real import cuda_devices
from hetkit.errors import LaunchError
from hetkit.launch import messages as m
from hetkit.launch.channel import ZmqLink
from hetkit.launch.crew import Crew, Incoming, Job
from hetkit.launch.orders import WorkerStart
from hetkit.launch.output import OutputLog
from hetkit.launch.torchrun import Gathering, Seat, read_note
from hetkit.planning.schedule import resolve_amp
from hetkit.records.book import Book
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.records.status import Status
from hetkit.settings import Settings
from hetkit.subject import check_loop

if TYPE_CHECKING:
    from hetkit.worker.own.loop import Worker

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long rank 0 waits for what the other ranks still have to tell."""

_KEY = "hetkit/folder"


@contextmanager
def worker(
    *, devices: object = None, global_batch: int = 256, seed: int = 0, **settings: Any
) -> "Iterator[Worker]":
    """Leads the loop inside: this process is one rank of those that ``torchrun`` has started.

    Started without ``torchrun``, as ``python train.py``, it is the only rank. All ranks must be on
    one host. The arguments count on rank 0.

    Args:
        devices: As in `hetkit.Session`, one for each rank; None (default): the GPUs in order where
            there are enough, else CPU cores.
        global_batch: Samples in a step over all ranks. Default 256.
        seed: Seeds the weights, the order of the samples, and what is random inside a step.
        **settings: Any other field of `hetkit.Settings`.

    Yields:
        The worker: see `hetkit.worker.own.loop.Worker`; on rank 0 with ``ledger`` and ``history``.

    Raises:
        LaunchError: The ranks are on several hosts, or rank 0 could not be reached.
        SettingsError, DeviceError: An argument is out of its range.
        Exception: What a rank's code raised: on that rank as it is, on rank 0 with a note of where.
            The others raise a `WorkerError` or what their broken exchange raises.

    Example:
        >>> import torch, hetkit as hk
        >>> data = torch.randn(64, 3), torch.randn(64, 1)
        >>> with hk.worker(devices="cpu", global_batch=16) as worker:
        ...     model = worker.wrap(torch.nn.Linear(3, 1))
        ...     _ = worker.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for epoch in worker.epochs(2):
        ...         for inputs, targets in worker.batches(data):
        ...             with worker.step():
        ...                 loss = (model(inputs) - targets).square().mean()
        ...                 worker.backward(loss, count=len(inputs))
        >>> [row.last_step for row in worker.ledger]
        [3, 7]
    """
    seat = Seat.of(os.environ)
    asked = Settings(global_batch=global_batch).change(**settings)
    asked.check_ranks(seat.world_size)
    check_loop(asked)
    with ExitStack() as stack:
        stack.enter_context(_terminable())
        board = _Board(seat)
        lead = None
        if seat.rank == 0:
            stack.callback(board.post, "")  # whoever still waits when this rank has failed
            fleet = _fleet(devices, seat.world_size)
            resolve_amp(asked, fleet)
            lead = stack.enter_context(_Lead.opened(fleet, asked, seed))
            board.post(str(lead.folder))
        note = read_note(lead.folder if lead else board.read(), seat.rank)
        yield from _follow(note, lead, stack)


class _Board:
    """Where rank 0 posts the folder's path for the others: torchrun's store.

    Args:
        seat: This process's place.
    """

    def __init__(self, seat: Seat) -> None:
        self._store: Any = None
        if seat.world_size > 1:
            from torch.distributed.rendezvous import rendezvous

            self._store, _, _ = next(iter(rendezvous("env://")))

    def post(self, path: str) -> None:
        """Posts the folder's path; empty: rank 0 has failed."""
        if self._store is not None:
            self._store.set(_KEY, path)

    def read(self) -> Path:
        """Waits for the folder's path.

        Raises:
            LaunchError: Rank 0 has failed.
        """
        path = self._store.get(_KEY).decode()
        if not path:
            raise LaunchError("rank 0 could not start, or has ended: see there.")
        return Path(path)


def _follow(note: WorkerStart, lead: "_Lead | None", stack: ExitStack) -> "Iterator[Worker]":
    from hetkit.worker.script_rank import ScriptRank

    link = ZmqLink(note.endpoint, note.keys, note.peer)
    stack.callback(link.close)
    after = lead.await_row if lead else _nothing
    rank = ScriptRank(link, note.peer.generation, note.peer.rank, after)
    stack.callback(rank.close)
    try:
        made = rank.begin()
        if lead is not None:
            made.ledger, made.history = lead.book.ledger, lead.book.history
        yield made
        rank.end_loop()
        if lead is not None:
            lead.settle()
    except BaseException as error:
        rank.tell(error)
        if lead is None:
            shutil.rmtree(note.folder, ignore_errors=True)  # rank 0 may be gone already
        else:
            lead.raise_cause(error)
        raise


def _fleet(devices: object, world_size: int) -> Fleet:
    if devices is None:
        cards = cuda_devices()[:world_size]
        devices = cards if len(cards) == world_size else f"cpu*{world_size}"
    fleet = parse_fleet(devices)
    if len(fleet) != world_size:
        raise LaunchError(
            f"there are {world_size} ranks and {len(fleet)} devices: give one device for each, or "
            f"start with torchrun --nproc_per_node {len(fleet)}."
        )
    return fleet


class _Lead:
    """Rank 0's coordinator.

    Args:
        fleet: The devices, in rank order.
        settings: What is asked for; checked.
        seed: The loop's seed.
        folder: A private folder.
    """

    def __init__(self, fleet: Fleet, settings: Settings, seed: int, folder: Path) -> None:
        self.folder = folder
        labels = fleet.labels
        self.book = Book(History(labels, [d.emulated for d in fleet]), Ledger(labels))
        job = Job(
            devices=tuple(fleet), payload=folder, seed=seed, global_batch=settings.global_batch
        )
        self._coordinator = Coordinator(
            self._make_crew, job, settings, self.book, OutputLog(), folder
        )

    def _make_crew(self, deliver: Callable[[Incoming], None]) -> Crew:
        gathering = Gathering(self.folder, lambda: crew.tell(m.Leave()))
        crew = Crew(self.folder.name, self.folder, deliver, lambda: gathering, forks=False)
        return crew

    @classmethod
    @contextmanager
    def opened(cls, fleet: Fleet, settings: Settings, seed: int) -> "Iterator[_Lead]":
        """Claims the devices and starts the coordinator; on the way out closes it all."""
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="hetkit-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            shared = [device for device in fleet if device.emulated or device.kind == "cuda"]
            stack.callback(claim(shared, folder.name).close)
            lead = cls(fleet, settings, seed, folder)
            stack.callback(lead._close)
            lead._coordinator.ask(lambda: lead._coordinator.run(None))
            yield lead

    def await_row(self, epoch: int) -> None:
        """Waits until the ranks' reports of ``epoch`` are in the ledger."""
        self._coordinator.wait(
            lambda status: status.progress.epoch > epoch or status.state == "failed", SETTLE_S
        )

    def settle(self) -> None:
        """Waits for the reports of all ranks, which have all come to their end."""
        if not self._coordinator.wait(_is_settled, SETTLE_S):
            log.warning("not every rank has reported within %.0f s", SETTLE_S)
        self._raise_failure(None)

    def raise_cause(self, error: BaseException) -> None:
        """Raises what made another rank fail, if that is why this one did."""
        if isinstance(error, Exception):
            self._coordinator.wait(lambda status: status.state == "failed", SETTLE_S)
            self._raise_failure(error)

    def _raise_failure(self, error: Exception | None) -> None:
        cause = self._coordinator.status.error
        if cause is not None and str(cause) != str(error):
            raise cause.with_traceback(None) from error

    def _close(self) -> None:
        self._coordinator.submit(self._coordinator.close)
        self._coordinator.join(timeout_s=10.0)


def _nothing(epoch: int) -> None:
    """Only rank 0 has a ledger to wait for."""


def _is_settled(status: Status) -> bool:
    return status.state in ("ready", "failed") and status.settled


@contextmanager
def _terminable() -> Iterator[None]:
    """Has SIGTERM, by which torchrun ends its ranks, unwind the script: nothing is left behind."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
