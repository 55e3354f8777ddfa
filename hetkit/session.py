"""Session: the one handle that a notebook or a script holds."""

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetkit.coordinator import Coordinator
from hetkit.devices.busy import Claim, claim
from hetkit.devices.fleet import Fleet, parse_fleet
from hetkit.errors import SessionError, SettingsError
from hetkit.launch.crew import Crew, Job
from hetkit.launch.local import shared_nursery
from hetkit.launch.output import OutputLog
from hetkit.launch.payload import Payload, dump_bytes
from hetkit.records.book import Book
from hetkit.records.checkpoint_file import pack, settings_that_fit, unpack
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.records.waiting import follow
from hetkit.settings import Settings, check_int
from hetkit.subject import subject_of
from hetkit.task import Task
from hetkit.view import View


class Session(View):
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
        self._subject = subject_of(task)
        check_int("seed", seed, minimum=0)
        self._seed = seed
        self._inline = devices == "inline"
        fleet = parse_fleet(devices)
        asked = Settings(global_batch=global_batch).change(**settings)
        self._subject.check(asked, fleet)
        self._folder = Path(tempfile.mkdtemp(prefix="hetkit-"))
        name = name or self._folder.name
        try:
            self._payload = self._dump()
            if not self._inline:
                shared_nursery().preload(self._subject.preload)
            super().__init__(name, fleet, self._make_coordinator(name, fleet, asked))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._held: list[Claim] = []
        self._worker: Any = None
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._coordinator, self._held, self._folder)

    def _make_coordinator(self, name: str, fleet: Fleet, settings: Settings) -> Coordinator:
        folder, labels = self._folder, fleet.labels
        history = History(labels, [device.emulated for device in fleet])
        job = Job(
            devices=tuple(fleet),
            payload=Path(self._payload.path),
            seed=self._seed,
            global_batch=settings.global_batch,
            preload=self._subject.preload,
            entry=self._subject.entry,
        )
        nursery = None if self._inline else shared_nursery
        return Coordinator(
            lambda deliver: Crew(name, folder, deliver, nursery),
            job,
            settings,
            Book(history, Ledger(labels)),
            OutputLog(),
            folder,
        )

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
            self._subject.check(wanted, self._fleet)
            self._coordinator.ask(lambda: self._coordinator.change(wanted))

    # ── taking out ──

    def model(self, *, ema: bool = False) -> Any:
        """Returns the trained model as it stands now, in this process, on the CPU.

        Of your own loop, the model that it wrapped; where there are several, a dict by name.

        Args:
            ema: The average of the weights that ``Task(ema=…)`` keeps, instead of the weights.

        Raises:
            SessionError: There is no state yet, or the session is closed.
            SettingsError: There is no such average.
        """
        return self._subject.model(self._save_state, self.call, ema=ema)

    def save(self, path: str | Path) -> Path:
        """Writes a checkpoint that `load` goes on from, on any number of devices.

        Raises:
            SessionError: There is no state yet, or the session is closed.
        """
        state = self._save_state()
        try:
            target = Path(path)
            # In mid-epoch, the position only makes sense under the settings in force.
            settings = self.applied or self.settings
            pack(target, state, {"seed": self._seed, "settings": asdict(settings)})
        finally:
            state.unlink(missing_ok=True)
        return target

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

    def call(self, function: Callable[[Any], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Runs ``function(worker)`` on ranks, between two steps, and returns what they return.

        Args:
            function: Gets the rank's ``rank, world_size, device, model, optimizer, step, epoch``.
            ranks: Which ranks; None: all.

        Raises:
            SettingsError: There is no such rank.
            SessionError: The workers do not run.
            Exception: What the function raised.
        """
        world_size = len(self._fleet)
        chosen = tuple(range(world_size)) if ranks is None else tuple(ranks)
        for rank in chosen:
            if rank not in range(world_size):
                raise SettingsError(f"there is no rank {rank!r}: ranks are 0 to {world_size - 1}.")
        if not chosen:
            return []
        pickled = dump_bytes(function, "function")
        results: list[Any] = self._answer(
            lambda future: self._coordinator.call(chosen, pickled, future)
        )
        return results

    def _save_state(self) -> Path:
        path = self._folder / f"state-{threading.get_ident()}.ckpt"
        saved: Path = self._answer(lambda future: self._coordinator.save(path, future))
        return saved

    def _answer(self, ask: Callable[["Future[Any]"], None]) -> Any:
        future: Future[Any] = Future()
        self._coordinator.ask(lambda: ask(future))
        if self._inline and self._worker is not None:
            self._worker.serve(until=future.done)
        # No time limit: only the user knows how long it takes. A death or a close() ends the wait.
        return future.result()

    # ── inside ──

    def _start_from(self, state: Path | None) -> None:
        payload = Path(self._payload.path)
        self._coordinator.ask(lambda: self._coordinator.restart_with(payload, state))

    def _prepare(self) -> None:
        """Claims the devices, and has a task whose code has changed get fresh workers."""
        if self.state not in ("new", "ready", "failed"):
            return
        if not self._held:
            shared = [device for device in self._fleet if device.emulated or device.kind == "cuda"]
            self._held.append(claim(shared, self._name))
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

    def _serve_inline(self) -> None:
        if not self._inline:
            return
        crew, coordinator = self._coordinator.crew, self._coordinator
        if crew.link is None:
            return
        if self._worker is None or self._worker.generation != crew.generation:
            self._worker = self._subject.make_rank(crew.link, crew.generation)
            self._worker.hello()
        rests = ("ready", "paused", "failed", "closed")
        try:
            self._worker.serve(until=lambda: coordinator.status.state in rests)
        except BaseException:
            self._worker = None
            coordinator.wait(lambda status: status.state == "failed", 5.0)
            raise
        if self._worker.unwound and self.state == "paused":
            self.stop()  # what could go on is gone from the stack: the next run builds it anew


def _end(coordinator: Coordinator, held: list[Claim], folder: Path) -> None:
    coordinator.submit(coordinator.close)
    coordinator.join(timeout_s=10.0)
    for each in held:
        each.close()
    shutil.rmtree(folder, ignore_errors=True)
