"""The coordinator: the kernel-side thread that hands out plans and grants and takes progress in.

One inbox, one thread: the session's commands, the workers' messages and the nursery's events are
handled one after the other, so there is nothing to lock::

    session ── commands ──▶ ┌─────────────┐ ◀── events ──── nursery
                            │ coordinator │
    book ◀── steps, rows ── └─────────────┘ ◀── messages ── workers
                                   └── plans, grants ─────▶ workers
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetkit.conductor import Conductor
from hetkit.devices.seats import follow_devices
from hetkit.errors import SessionError
from hetkit.launch import messages as m
from hetkit.launch.channel import Peer
from hetkit.launch.crew import Crew, Incoming, Job
from hetkit.launch.mailbox import Command, Mailbox
from hetkit.launch.orders import Exited, NurseryLost, Output
from hetkit.launch.output import OutputLog
from hetkit.records.book import Book
from hetkit.records.status import State, Status
from hetkit.settings import Settings

log = logging.getLogger(__name__)

LEAVE_S = 2.0


@dataclass(frozen=True)
class Move:
    """Other devices that the user has asked for, until the workers stand on them."""

    before: tuple[int, ...]
    places: tuple[int, ...]
    freed: Callable[[], None]
    state: Path | None


class Coordinator(Conductor):
    """A conductor on a thread of its own, which obeys the session's commands.

    Args:
        make_crew: Makes the session's workers, given what takes their messages and events.
        job: What the workers are started for.
        settings: What the user wants at first.
        book: Takes steps, events and epochs.
        output: Takes what the workers print.
        folder: The session's private folder, for snapshots.
    """

    def __init__(
        self,
        make_crew: Callable[[Callable[[Incoming], None]], Crew],
        job: Job,
        settings: Settings,
        book: Book,
        output: OutputLog,
        folder: Path,
    ) -> None:
        self._mailbox = Mailbox[Incoming](closed="the session is closed: make a new Session.")
        super().__init__(make_crew(self._mailbox.put), job, settings, book, output, folder)
        self._fleet = job.devices
        self._move: Move | None = None
        self._leaving: tuple[set[Peer], Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._main, name="hetkit-coordinator", daemon=True)
        self._thread.start()

    # ── any thread ──

    def submit(self, command: Callable[[], None]) -> None:
        """Has ``command`` executed by the coordinator's thread; returns at once."""
        self._mailbox.put(Command(command))

    def ask(self, command: Callable[[], None], timeout_s: float = 10.0) -> None:
        """Has ``command`` executed and waits for it; raises what it raises."""
        self._mailbox.ask(command, timeout_s)

    def wait(self, until: Callable[[Status], bool], timeout_s: float | None) -> bool:
        """Waits until the status satisfies ``until``; returns False when time runs out."""
        return self.board.wait(until, timeout_s)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end, after `close`."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ── the thread ──

    def _main(self) -> None:
        while self.status.state != "closed":
            item = self._mailbox.take(0.1)
            try:
                self._handle(item)
                self.look_at_the_clock()
                self._move_on()
            except Exception as error:
                log.exception("the coordinator failed")
                self.fail(error)
        self._mailbox.close()

    def _handle(self, item: Incoming | Command | None) -> None:
        match item:
            case Command():
                item.execute()
            case (peer, message):
                if peer.generation == self.crew.generation:
                    self.hear(peer, message)
            case Output(peer=peer, stream=stream, text=text):
                self.output.add(peer, stream, text)
            case Exited(peer=peer):
                self.on_exit(item)
                self._gone(peer)
            case NurseryLost(reason=reason):
                self.on_lost_nursery(reason)

    # ── commands ──

    def run(self, epochs: int | None) -> None:
        """Trains ``epochs`` more epochs; None: all that an own loop has."""
        if self.course.at_work:  # a run that is being stopped may be followed by the next at once
            self._require("new", "ready", "failed")
        self._require("new", "ready", "failed", "running", "paused")
        self._require_a_loop()
        self._steer(lambda: self.course.run(epochs))

    def pause(self) -> None:
        """Pauses at the end of what was granted."""
        self._require("starting", "running", "paused", "recovering")
        self._steer(self.course.pause)

    def resume(self) -> None:
        """Goes on after a pause."""
        self._require("starting", "running", "paused", "recovering")
        self._steer(self.course.resume)

    def take_steps(self, steps: int) -> None:
        """Executes exactly ``steps`` more and pauses there."""
        self._require("new", "ready", "running", "paused", "starting", "failed")
        self._require_a_loop()

        def take() -> None:
            if not self.course.at_work:
                self.course.run(1)
            self.course.take_steps(steps)

        self._steer(take)

    def stop(self) -> None:
        """Ends the run at the end of what was granted; the workers stay warm."""
        self._require("ready", "new", "starting", "running", "paused", "recovering")
        if self.status.state != "new":
            self._steer(self.course.stop)

    def _steer(self, command: Callable[[], None]) -> None:
        """Has the course obey: at once where the ranks stand, else once it is known where."""
        if self.status.state in ("new", "failed"):
            self.upon_start = [command]
            self.set_state("starting", error=None)
            self.start()
        elif self.status.state == "starting":
            self.upon_start.append(command)
        else:
            command()
            self.advance()

    def change(self, settings: Settings) -> None:
        """Takes settings that were checked; `Course` knows when each takes effect."""
        if settings == self.course.settings:
            return
        before = self.course.settings
        self.course.settings = settings
        shares = (settings.batches, settings.micro_batch)
        if settings.batches == "auto" and shares != (before.batches, before.micro_batch):
            self.scales.take_over()
        self.advance()

    def restart_with(self, payload: Path, snapshot: Path | None) -> None:
        """The next run starts fresh workers, which go on from ``snapshot``; None: the last one."""
        self._require("new", "ready", "failed")
        if payload != self.job.payload:
            self.figures = {}
        self.job = replace(self.job, payload=payload, snapshot=snapshot or self.job.snapshot)
        if self.status.state == "ready":
            self.crew.kill()
            self.set_state("new")

    def move(
        self,
        before: tuple[int, ...],
        places: tuple[int, ...],
        settings: Settings,
        state: Path | None,
        freed: Callable[[], None],
    ) -> None:
        """Goes on with other devices of the fleet, from the present state.

        Args:
            before: The places of the devices in use.
            places: Those of the devices to come.
            settings: What the user wants, made to fit them.
            state: The training state, where the ranks rest; None: rank 0 is asked for it.
            freed: Called once no worker is left on the devices before.
        """
        self._require("new", "ready", "failed", "running", "paused")
        if self._move is not None:
            before = self._move.before
        self._move = Move(before, places, freed, state)
        self.course.settings = settings
        if self.status.state in ("running", "paused"):
            self.set_state("recovering")  # so nothing more is granted
            future: Future[Any] = Future()
            future.add_done_callback(self._on_state)
            path = self._folder / f"move-{self.crew.generation}.ckpt"
            number = self.calls.open((0,), future)
            self.crew.tell(m.SaveState(path=str(path), call_id=number))
            return
        self.crew.kill()
        self._take_seats()
        if self.status.state == "ready":
            self.set_state("new")

    def _on_state(self, future: "Future[Any]") -> None:
        if self._move is not None and future.exception() is None:
            self._move = replace(self._move, state=future.result())

    def _move_on(self) -> None:
        """Moves once the state is on disk and all ranks stand."""
        waiting = self._move is not None and self._move.state is not None
        if waiting and self.course.settled and self.status.state == "recovering":
            self.crew.kill()
            self.start()

    def start(self) -> None:
        """Starts the next generation of workers, on the devices that were asked for."""
        self._take_seats()
        super().start()

    def _take_seats(self) -> None:
        move, self._move = self._move, None
        if move is None:
            return
        devices = tuple(self._fleet[place] for place in move.places)
        self.job = replace(self.job, devices=devices, snapshot=move.state or self.job.snapshot)
        applied = self.course.applied
        if applied is not None:
            applied = follow_devices(applied, move.before, move.places, self.course.settings)
        self.course.seat(devices, applied)
        self.scales.seat([move.before.index(p) if p in move.before else None for p in move.places])
        self.book.seat(move.places)
        labels = ", ".join(device.label for device in devices)
        self.book.note(
            "plan", f"trains on {labels}", step=self.course.done, epoch=self.course.epoch
        )
        self._leaving = set(self.alive), move.freed
        self._gone(None)

    def _gone(self, peer: Peer | None) -> None:
        """A worker has ended; the last of those before a move frees the devices."""
        if self._leaving is None:
            return
        peers, freed = self._leaving
        peers -= {peer}
        if not peers:
            self._leaving = None
            freed()

    def save(self, path: Path, future: "Future[Any]") -> None:
        """Has rank 0 write the training state; without workers, the last one that was written."""
        if self.status.state in ("new", "failed") and self.job.snapshot is not None:
            future.set_result(Path(shutil.copyfile(self.job.snapshot, path)))
            return
        self._require("ready", "running", "paused")
        number = self.calls.open((0,), future)
        self.crew.tell(m.SaveState(path=str(path), call_id=number))

    def call(self, ranks: tuple[int, ...], pickled: bytes, future: "Future[Any]") -> None:
        """Has a function run on ranks once their earlier grants are executed."""
        self._require("ready", "running", "paused")
        number = self.calls.open(ranks, future)
        for rank in ranks:
            self.crew.tell_rank(rank, m.Call(call_id=number, pickled=pickled))

    def close(self) -> None:
        """Ends the workers, in good order where they stand, and then the thread."""
        at_rest = self.course.settled and self.status.state in ("ready", "paused")
        try:
            self.calls.fail_all(SessionError("the session was closed."))
            if self.alive and at_rest:
                self.crew.tell(m.Leave())
                self._await_exits(LEAVE_S)
            self.crew.kill()
            self._await_exits(LEAVE_S)
            self.crew.close()
        finally:
            self.set_state("closed")

    def _await_exits(self, limit_s: float) -> None:
        def note(item: Incoming) -> bool:
            match item:
                case Exited(peer=peer):
                    self.alive.discard(peer)
                case Output(peer=peer, stream=stream, text=text):
                    self.output.add(peer, stream, text)
                case NurseryLost():
                    self.alive.clear()
            return not self.alive

        if self.alive:
            self._mailbox.take_until(time.monotonic() + limit_s, note)

    def _require_a_loop(self) -> None:
        if self.course.ended and self.status.state == "ready":
            raise SessionError(
                f"the loop has come to its end after {self.course.epoch} epochs: for more, give "
                "worker.epochs(…) a larger number and run again, or make a new Session."
            )

    def _require(self, *states: State) -> None:
        now = self.status.state
        if now not in states:
            hint = {
                "running": "wait(), pause() or stop() first",
                "paused": "resume() or stop() first",
                "ready": "run() first",
                "new": "run() first",
                "failed": "look at session.error, then run() again",
            }.get(now, "make a new Session" if now == "closed" else "wait a moment")
            raise SessionError(f"the session is {now}: {hint}.")
