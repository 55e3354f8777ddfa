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
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetkit.conductor import Conductor
from hetkit.errors import SessionError
from hetkit.launch import messages as m
from hetkit.launch.crew import Crew, Incoming, Job
from hetkit.launch.mailbox import Command, Mailbox
from hetkit.launch.orders import Exited, NurseryLost, Output
from hetkit.launch.output import OutputLog
from hetkit.records.book import Book
from hetkit.records.status import State, Status
from hetkit.settings import Settings

log = logging.getLogger(__name__)

LEAVE_S = 2.0


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
            case Exited():
                self.on_exit(item)
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
        if settings.batches == "auto" != before.batches:
            self.scales.take_over()
        self.advance()

    def restart_with(self, payload: Path, snapshot: Path | None) -> None:
        """The next run starts fresh workers, which go on from ``snapshot``; None: the last one."""
        self._require("new", "ready", "failed")
        self.job = replace(self.job, payload=payload, snapshot=snapshot or self.job.snapshot)
        if self.status.state == "ready":
            self.crew.kill()
            self.set_state("new")

    def save(self, path: Path, future: "Future[Any]") -> None:
        """Has rank 0 write the training state; without workers, the last one that was written."""
        if self.status.state in ("new", "failed") and self.job.snapshot is not None:
            future.set_result(Path(shutil.copyfile(self.job.snapshot, path)))
            return
        self._require("ready", "running", "paused")
        number = self.calls.open((0,), future)
        self.crew.tell_rank(0, m.SaveState(path=str(path), call_id=number))

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
