"""Session: the one handle that a notebook or a script holds."""

import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetkit.coordinator import Coordinator
from hetkit.devices.fleet import Fleet, parse_fleet
from hetkit.devices.seats import Seats, choose, follow_devices
from hetkit.errors import SessionError, SettingsError
from hetkit.launch.crew import Crew, Job
from hetkit.launch.local import shared_nursery
from hetkit.launch.output import OutputLog
from hetkit.launch.payload import Payload
from hetkit.outlook import Outlook
from hetkit.planning.verdict import Verdict
from hetkit.records.book import Book
from hetkit.records.checkpoint_file import settings_that_fit, unpack
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.records.waiting import follow
from hetkit.settings import Settings, check_int
from hetkit.subject import subject_of
from hetkit.task import Task


class Session(Outlook):
    """Trains a task on a fleet of devices, and lets a user watch and steer it.

    Making one checks everything that can be checked in this process and starts the workers' parent
    in the background; the workers start with the first `run`. All methods return at once, except
    `wait` and those that give something back (`model`, `save`, `call`).

    Args:
        task: What is trained: a `hetkit.Task`; or a training loop of your own, a function of one
            argument, `hetkit.worker.own.loop.Worker`.
        devices: ``"auto"`` (default: the machine's GPUs, else its CPU), names such as
            ``"cuda:0, cuda:1"`` or ``"cpu*2"``, devices, a fleet of `hetkit.emulate`, or
            ``"inline"``: one rank in this very process, which loads the data by itself too, so
            that breakpoints and prints work; `run` then returns when it is done.
        global_batch: Samples in a step over all devices. Default 256.
        seed: Seeds the weights, the order of the samples, and what is random inside a step.
        name: What messages call the session; default: a short unique name.
        **settings: Any other field of `hetkit.Settings`.

    Raises:
        SettingsError: A setting is out of its range, or a device lacks a precision.
        DeviceError: There is no such device.
        PayloadError: A part of the task cannot travel to the workers; the message names it.
        DataError: The data is empty.

    Example:
        >>> import torch, hetkit as hk
        >>> data = torch.randn(64, 3), torch.randn(64, 1)
        >>> task = hk.Task(
        ...     model=lambda: torch.nn.Linear(3, 1),
        ...     data=data,
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ... )
        >>> with hk.Session(task, devices="cpu*2", global_batch=16) as session:
        ...     session.run(epochs=2)
        ...     session.wait()
        ...     (session.ledger[1].last_step, session.model().weight.shape)
        (7, torch.Size([1, 3]))
    """

    def __init__(
        self,
        task: Task | Callable[[Any], object],
        *,
        devices: object = "auto",
        global_batch: int = 256,
        seed: int = 0,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        subject = subject_of(task)
        check_int("seed", seed, minimum=0)
        inline = devices == "inline"
        fleet = parse_fleet(devices)
        asked = Settings(global_batch=global_batch).change(**settings)
        subject.check(asked, fleet)
        folder = Path(tempfile.mkdtemp(prefix="hetkit-"))
        name = name or folder.name
        try:
            self._payload = subject.dump(folder, inline=inline)
            if not inline:
                shared_nursery().preload(subject.preload)
            job = Job(
                devices=tuple(fleet),
                payload=Path(self._payload.path),
                seed=seed,
                global_batch=asked.global_batch,
                preload=subject.preload,
                entry=subject.entry,
            )
            coordinator = _coordinator(name, fleet, job, asked, folder, inline=inline)
            super().__init__(
                name, fleet, coordinator, subject=subject, folder=folder, seed=seed, inline=inline
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, coordinator, self._seats, folder)

    # ── running ──

    def run(self, epochs: int | None = None) -> None:
        """Trains more epochs, from where the training stands. Returns at once.

        A task whose code has changed since (an edited and reloaded module, say) gets fresh
        workers, which go on from the present state; otherwise the workers are still warm.

        Args:
            epochs: How many; by default one of a task, and of your own loop all that it has.

        Raises:
            SessionError: The session is running, or closed.
            SettingsError: ``epochs`` is not an int of at least 1.
            DeviceBusyError: Another session trains on one of the devices.
        """
        epochs = self._subject.epochs if epochs is None else epochs
        if epochs is not None:
            check_int("epochs", epochs, minimum=1)
        self._prepare()
        self._coordinator.ask(lambda: self._coordinator.run(epochs))
        self._serve_inline()

    def step(self, n: int = 1) -> None:
        """Executes exactly ``n`` more steps and pauses there. Returns at once."""
        check_int("n", n, minimum=1)
        if self.state in ("new", "ready", "failed"):
            self._prepare()
        self._coordinator.ask(lambda: self._coordinator.take_steps(n))
        self._serve_inline()

    def pause(self) -> None:
        """Pauses: all ranks stop at the same step, at most about a second from now."""
        self._coordinator.ask(self._coordinator.pause)

    def resume(self) -> None:
        """Goes on after a pause."""
        self._coordinator.ask(self._coordinator.resume)
        self._serve_inline()

    def stop(self) -> None:
        """Ends the run where all ranks stand next; the workers stay warm for another."""
        self._coordinator.ask(self._coordinator.stop)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the run has ended, with a progress bar; an interrupt pauses the training.

        Args:
            timeout_s: How long to wait; None: as long as it takes.

        Raises:
            TimeoutError: The time ran out; the training goes on.
            Exception: What made the training fail: a worker's exception as itself, with a note of
                its rank, its step and the worker's traceback.
        """
        coordinator = self._coordinator
        left = [timeout_s if timeout_s is not None else float("inf")]

        def ended(seconds: float) -> bool:
            seconds = min(seconds, max(0.0, left[0]))
            left[0] -= seconds
            return self._ended(seconds) or left[0] <= 0

        try:
            follow(lambda: coordinator.status, self.history, ended)
        except KeyboardInterrupt as interrupt:
            if self.state in ("starting", "running", "recovering"):
                self.pause()
                interrupt.add_note("The training pauses: resume() it, or stop() it.")
            raise
        if self.error is not None:
            raise self.error.with_traceback(None)
        if not self._ended(0.0):
            raise TimeoutError(f"still {self.state} after {timeout_s} s; the training goes on.")

    def _ended(self, seconds: float) -> bool:
        ends = ("new", "ready", "failed", "closed")
        return self._coordinator.wait(lambda status: status.state in ends, seconds)

    def close(self) -> None:
        """Ends the workers and frees the devices. Closing twice is fine."""
        self._end()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── steering ──

    def set(self, **changes: Any) -> None:
        """Changes settings of the running training; each field says when it takes effect.

        Args:
            **changes: Fields of `hetkit.Settings`.

        Raises:
            SettingsError: A name or a value is wrong; nothing was changed.
        """
        if self.state == "closed":
            raise SessionError("the session is closed: make a new Session.")
        with self._lock:
            wanted = self.settings.change(**changes)
            self._subject.check(wanted, self._in_use(self.ranks))
            self._coordinator.ask(lambda: self._coordinator.change(wanted))

    def use(self, devices: Sequence[int | str] | Verdict) -> None:
        """Trains on these devices of the fleet only, from where the ranks stand next.

        The workers are started anew on them and go on from the present state, over the same
        samples; the other devices are free for others then. Lists of one value per rank follow
        their devices, samples per rank as ratios.

        Args:
            devices: Places in `devices`, or labels, in any order; or a verdict, whose best choice
                is taken.

        Raises:
            SettingsError: There is no such device; or a list in the settings has no value for one.
            DeviceBusyError: Another session trains on one of the devices.
            SessionError: The session is starting, recovering or closed.
        """
        if isinstance(devices, Verdict):
            devices = [devices.labels[rank] for rank in devices.best_subset.ranks]
        with self._lock:
            self._move_to(choose(self._fleet, devices))

    def drop(self, *devices: int | str) -> None:
        """Trains on without these devices; see `use`.

        Args:
            *devices: Places in `devices`, or labels, that are in use.

        Raises:
            SettingsError: There is no such device, it is not in use, or none would be left.
        """
        with self._lock:
            gone = choose(self._fleet, devices)
            idle = [self._fleet.labels[place] for place in gone if place not in self.ranks]
            if idle:
                raise SettingsError(f"not in use, so not to be dropped: {', '.join(idle)}.")
            self._move_to(tuple(place for place in self.ranks if place not in gone))

    def _move_to(self, places: tuple[int, ...]) -> None:
        before = self.ranks
        if places == before:
            return
        if not places:
            raise SettingsError("no device would be left to train on: keep one at least.")
        wanted = follow_devices(self.settings, before, places)
        self._subject.check(wanted, self._in_use(places))
        coordinator, seats = self._coordinator, self._seats
        # Where they rest, the state is taken here; in a run, by the coordinator where they stand.
        state = self._keep_state(f"{time.monotonic_ns()}") if self.state == "ready" else None
        if seats.claimed:
            seats.claim(places)
        seats.places = places
        try:
            coordinator.ask(lambda: coordinator.move(before, places, wanted, state, seats.tidy))
        except BaseException:
            seats.places = before
            seats.tidy()
            raise

    @classmethod
    def load(
        cls,
        path: str | Path,
        task: Task | Callable[[Any], object],
        *,
        devices: object = "auto",
        **settings: Any,
    ) -> "Session":
        """Returns a session that goes on from a checkpoint, with the same data order.

        Args:
            path: What `save` wrote.
            task: The task that was saved, or one with the same model and optimizer.
            devices: As in `Session`; they need not be those that saved it.
            **settings: Settings to change; the rest is the checkpoint's, where it fits.

        Raises:
            TaskError: The file is no checkpoint of ours.
        """
        with tempfile.TemporaryDirectory(prefix="hetkit-") as folder:
            state, facts = unpack(Path(path), Path(folder))
            fleet: object = devices if devices == "inline" else parse_fleet(devices)
            world_size = len(fleet) if isinstance(fleet, Fleet) else 1
            kept = settings_that_fit(facts, world_size)
            session = cls(task, devices=fleet, seed=facts["seed"], **{**kept, **settings})
            session._start_from(Path(shutil.copyfile(state, session._folder / "start.ckpt")))
        return session

    # ── inside ──

    def _start_from(self, state: Path | None) -> None:
        payload = Path(self._payload.path)
        self._coordinator.ask(lambda: self._coordinator.restart_with(payload, state))

    def _prepare(self) -> None:
        """Claims the devices, and has a task whose code has changed get fresh workers."""
        if self.state not in ("new", "ready", "failed"):
            return
        self._seats.claim(self.ranks)
        payload, before = self._dump(), self._payload
        changed = payload.digest != before.digest
        if not changed and not (self._worker and self._worker.unwound):
            return
        state = self._keep_state(payload.digest) if self.state == "ready" else None
        self._payload = payload
        self._start_from(state)
        if changed:
            before.remove()

    def _dump(self) -> Payload:
        return self._subject.dump(self._folder, inline=self._inline)

    def _keep_state(self, name: str) -> Path:
        return self._save_state().rename(self._folder / f"before-{name}.ckpt")


def _coordinator(
    name: str, fleet: Fleet, job: Job, settings: Settings, folder: Path, *, inline: bool
) -> Coordinator:
    history = History(fleet.labels, [device.emulated for device in fleet])
    return Coordinator(
        lambda deliver: Crew(name, folder, deliver, None if inline else shared_nursery),
        job,
        settings,
        Book(history, Ledger(fleet.labels)),
        OutputLog(),
        folder,
    )


def _end(coordinator: Coordinator, seats: Seats, folder: Path) -> None:
    coordinator.submit(coordinator.close)
    coordinator.join(timeout_s=10.0)
    seats.close()
    shutil.rmtree(folder, ignore_errors=True)
