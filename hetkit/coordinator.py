"""The coordinator: the kernel-side thread that hands out plans and grants and takes progress in.

One inbox, one thread: the session's commands, the workers' messages and the nursery's events are
handled one after the other, so there is nothing to lock. What to tell the ranks is decided by the
`Course`, what to write down is written by the `Book`; here is what connects them::

    session ── commands ──▶ ┌─────────────┐ ◀── events ──── nursery
                            │ coordinator │
    book ◀── steps, rows ── └─────────────┘ ◀── messages ── workers
                                   └── plans, grants ─────▶ workers
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetkit.errors import HetkitError, LaunchError, PlanError, SessionError, WorkerDied
from hetkit.launch import messages as m
from hetkit.launch.calls import Calls
from hetkit.launch.channel import Peer
from hetkit.launch.crew import Crew, Incoming, Job
from hetkit.launch.failures import Failures, revive
from hetkit.launch.mailbox import Command, Mailbox
from hetkit.launch.orders import Exited, NurseryLost, Output
from hetkit.launch.output import OutputLog
from hetkit.planning.balance import Balance
from hetkit.planning.batch_split import imbalance_floor, split_batch, step_seconds
from hetkit.planning.course import Course, FinishEpoch, GrantUntil, NewPlan
from hetkit.planning.memory import MemoryModel, largest_micro_batch
from hetkit.planning.schedule import Position, epoch_steps
from hetkit.planning.step_time import Observation
from hetkit.records.board import Board
from hetkit.records.book import Book, Overhead
from hetkit.records.status import Progress, State, Status
from hetkit.records.steps import StepRecord
from hetkit.settings import Settings

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""How long the workers' processes may take to connect."""

LAST_LINES = 80
"""Of a dead worker's output: a fault in native code prints the stack of each of its threads."""

LEAVE_S = 2.0
MOST_RECOVERIES = 3
"""Deaths without a finished epoch in between before the session gives up."""


class Coordinator:
    """Runs one session's workers, from a thread of its own.

    Args:
        crew: The session's workers; ``deliver`` is what it must be made with.
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
        self.book = book
        self._mailbox = Mailbox[Incoming](closed="the session is closed: make a new Session.")
        self._board = Board()
        self.crew = make_crew(self._mailbox.put)
        self.course = Course(job.devices, settings)
        self.balance = Balance()
        self.overhead = Overhead()
        self._job = job
        self._output = output
        self._folder = folder
        self._calls = Calls()
        self._reports: dict[int, m.EpochReport] = {}
        self._failures = Failures()
        self._start_by: float | None = None
        self._upon_start: list[Callable[[], None]] = []
        self._alive: set[Peer] = set()
        self._recoveries = 0
        self._predicted_s: float | None = None
        self._thread = threading.Thread(target=self._main, name="hetkit-coordinator", daemon=True)
        self._thread.start()

    # ── any thread ──

    @property
    def status(self) -> Status:
        """Where the session stands."""
        return self._board.status

    def submit(self, command: Callable[[], None]) -> None:
        """Has ``command`` executed by the coordinator's thread; returns at once."""
        self._mailbox.put(Command(command))

    def ask(self, command: Callable[[], None], timeout_s: float = 10.0) -> None:
        """Has ``command`` executed and waits for it; raises what it raises."""
        self._mailbox.ask(command, timeout_s)

    def wait(self, until: Callable[[Status], bool], timeout_s: float | None) -> bool:
        """Waits until the status satisfies ``until``; returns False when time runs out."""
        return self._board.wait(until, timeout_s)

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
                self._look_at_the_clock()
            except Exception as error:
                log.exception("the coordinator failed")
                self._fail(error)
        self._mailbox.close()

    def _handle(self, item: Incoming | Command | None) -> None:
        match item:
            case Command():
                item.execute()
            case (peer, message):
                if peer.generation == self.crew.generation:
                    self._hear(peer, message)
            case Output(peer=peer, stream=stream, text=text):
                self._output.add(peer, stream, text)
            case Exited():
                self._on_exit(item)
            case NurseryLost(reason=reason):
                self._on_lost_nursery(reason)

    def _look_at_the_clock(self) -> None:
        if self._failures.due():
            self._failures.settle()
            self._on_failure()
        elif self._start_by is not None and time.monotonic() >= self._start_by:
            self._on_start_timeout()

    # ── commands ──

    def run(self, epochs: int) -> None:
        """Trains ``epochs`` more epochs."""
        self._require("new", "ready", "failed")
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
            self._upon_start = [command]
            self._set("starting", error=None)
            self._start()
        elif self.status.state == "starting":
            self._upon_start.append(command)
        else:
            command()
            self._advance()

    def change(self, settings: Settings) -> None:
        """Takes settings that were checked; `Course` knows when each takes effect."""
        if settings == self.course.settings:
            return
        before = self.course.settings
        self.course.settings = settings
        models, plan = self.balance.models(), self.course.plan
        if settings.batches == "auto" != before.batches and models is not None and plan is not None:
            # The devices were measured under the user's split: no need to warm up again.
            split = split_batch(models, plan.global_batch, micro_batches=plan.micro_batches)
            self.course.balance(split, "from the step times measured so far")
        self._advance()

    def restart_with(self, payload: Path, snapshot: Path | None) -> None:
        """The next run starts fresh workers, which go on from ``snapshot``; None: the last one."""
        self._require("new", "ready", "failed")
        self._job = replace(self._job, payload=payload, snapshot=snapshot or self._job.snapshot)
        if self.status.state == "ready":
            self._kill()
            self._set("new")

    def save(self, path: Path, future: "Future[Any]") -> None:
        """Has rank 0 write the training state."""
        self._require("ready", "running", "paused")
        number = self._calls.open((0,), future)
        self.crew.tell_rank(0, m.SaveState(path=str(path), call_id=number))

    def call(self, ranks: tuple[int, ...], pickled: bytes, future: "Future[Any]") -> None:
        """Has a function run on ranks once their earlier grants are executed."""
        self._require("ready", "running", "paused")
        number = self._calls.open(ranks, future)
        for rank in ranks:
            self.crew.tell_rank(rank, m.Call(call_id=number, pickled=pickled))

    def close(self) -> None:
        """Ends the workers, in good order where they stand, and then the thread."""
        at_rest = self.course.settled and self.status.state in ("ready", "paused")
        try:
            self._calls.fail_all(SessionError("the session was closed."))
            if self._alive and at_rest:
                self.crew.tell(m.Leave())
                self._await_exits(LEAVE_S)
            self._kill()
            self._await_exits(LEAVE_S)
            self.crew.close()
        finally:
            self._set("closed")

    def _await_exits(self, limit_s: float) -> None:
        def note(item: Incoming) -> bool:
            match item:
                case Exited(peer=peer):
                    self._alive.discard(peer)
                case Output(peer=peer, stream=stream, text=text):
                    self._output.add(peer, stream, text)
                case NurseryLost():
                    self._alive.clear()
            return not self._alive

        if self._alive:
            self._mailbox.take_until(time.monotonic() + limit_s, note)

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

    # ── workers ──

    def _start(self) -> None:
        self._failures, self._reports = Failures(), {}
        self._start_by = time.monotonic() + START_TIMEOUT_S
        try:
            self.crew.start(replace(self._job, global_batch=self.course.settings.global_batch))
        except HetkitError as error:
            self._fail(error)
            return
        if self.crew.link is None:
            ranks = range(len(self._job.devices))
            self._alive = {Peer(self.crew.generation, rank) for rank in ranks}

    def _hear(self, peer: Peer, message: m.Message) -> None:
        match message:
            case m.Hello() | m.StoreReady() | m.Ready():
                try:
                    readies = self.crew.hear(peer, message)
                except LaunchError as error:
                    self._fail(error)
                    return
                if self.crew.all_here:
                    self._start_by = None  # how long the user's own code takes, only the user knows
                if readies is not None:
                    self._on_ready(readies)
            case m.Progress():
                self._on_progress(message)
            case m.EpochReport():
                self._on_report(message)
            case m.Answer():
                self._calls.answered(message)
            case m.Saved():
                self._calls.saved(message)
            case m.Notice():
                self.book.note("notice", message.text, step=message.step, rank=message.rank)
            case m.Failed():
                self._failures.report(message)

    def _on_ready(self, readies: tuple[m.Ready, ...]) -> None:
        first = readies[0]
        position = Position(
            epoch=first.epoch,
            step=first.step,
            epoch_first_step=first.epoch_first_step,
            samples=first.samples,
        )
        try:
            caps = tuple(self._cap(ready) for ready in readies)
        except HetkitError as error:
            self._fail(error)
            return
        plan = self.status.plan
        if plan and plan.epoch == first.epoch and first.step == first.epoch_first_step:
            self.book.roll_back()  # the epoch had begun: its steps are executed again
        if self.status.state == "recovering":
            self.book.note(
                "recovery",
                f"training goes on from step {first.step}",
                step=first.step,
                epoch=first.epoch,
            )
        self.course.stand(position, caps if any(cap is not None for cap in caps) else None)
        self.balance.restart(first.step)
        for command in self._upon_start:
            command()
        self._upon_start = []
        self._set("running")
        self._advance()

    def _cap(self, ready: m.Ready) -> int | None:
        emulation = self._job.devices[ready.rank].emulation
        if emulation is None or emulation.memory_bytes is None or ready.sample_bytes is None:
            return None
        model = MemoryModel(fixed_bytes=ready.fixed_bytes or 0.0, sample_bytes=ready.sample_bytes)
        try:
            return largest_micro_batch(model, emulation.memory_bytes)
        except PlanError as error:
            error.add_note(f"on rank {ready.rank} ({self._job.devices[ready.rank].label})")
            raise

    def _advance(self) -> None:
        """Tells the ranks what the course says, and what state that is."""
        if self.status.state in ("running", "paused", "ready"):
            hold_at = self.balance.warm_until if self._balances() else None
            for order in self.course.orders(self.book.recent_step_s(), hold_at):
                self._order(order)
            if self.course.finished:
                self._set("ready")
            elif self.course.paused and self.course.settled:
                self._set("paused")
            elif self.course.at_work:
                self._set("running")
        self._publish()

    def _order(self, order: NewPlan | GrantUntil | FinishEpoch) -> None:
        match order:
            case NewPlan(plan=plan, changes=changes):
                previous = self.status.plan
                self._on_new_plan(order, begins=plan.first_step == plan.epoch_first_step)
                if previous is None or previous.batches != plan.batches:
                    self.balance.restart(plan.first_step)
                self.crew.tell(m.SetPlan(plan=plan))
                self._board.post(plan=plan, applied=self.course.applied)
                for change in changes:
                    self.book.note("settings", change, step=plan.first_step, epoch=plan.epoch)
            case GrantUntil(until=until):
                self.crew.tell(m.Grant(until=until))
            case FinishEpoch(epoch=epoch):
                path = self._folder / f"epoch-{epoch}.ckpt"
                self.crew.tell(m.EndEpoch(epoch=epoch, snapshot=str(path)))

    def _on_new_plan(self, order: NewPlan, *, begins: bool) -> None:
        plan, before = order.plan, self.status.plan
        if begins:
            self.book.begin_epoch(order.changes)
        else:
            text = f"split {list(plan.batches)} from step {plan.first_step}: {plan.reason}"
            self.book.note("plan", text, step=plan.first_step, epoch=plan.epoch)
        if before is not None and (before.amp, before.tf32) != (plan.amp, plan.tf32):
            self.balance.forget()
            self.balance.restart(plan.first_step)
        models = self.balance.models()
        self._predicted_s = None
        if models is not None:
            compute_s = step_seconds(models, plan.batches, plan.micro_batches)
            self._predicted_s = compute_s + self.overhead.all_s

    # ── progress ──

    def _on_progress(self, message: m.Progress) -> None:
        whole = self.book.take(message.rank, message.rows)
        self.course.progress(message.rank, message.rows[-1].step + 1)
        for record, rows in whole:
            self._weigh(record, rows)
        self._advance()

    def _weigh(self, record: StepRecord, rows: tuple[m.StepRow, ...]) -> None:
        self.balance.add(
            record.step,
            [
                Observation(batch=row.batch, micro_steps=row.micro_steps, compute_s=rank.compute_s)
                if row.batch and rank.compute_s > 0
                else None
                for row, rank in zip(rows, record.ranks, strict=True)
            ],
        )
        self.overhead.add(record)
        plan = self.course.plan
        if not self.balance.full or plan is None:
            return
        if not self._balances():
            self.balance.learn(plan)
            return
        decision = self.balance.decide(plan, comm_s=self.overhead.all_s)
        log.debug("balancer: %s", decision.reason)
        if decision.batches is not None:
            self.course.balance(decision.batches, decision.reason)

    def _balances(self) -> bool:
        return len(self._job.devices) > 1 and self.course.settings.batches == "auto"

    def _on_report(self, message: m.EpochReport) -> None:
        self._reports[message.rank] = message
        plan = self.course.plan
        if len(self._reports) < len(self._job.devices) or plan is None:
            return
        reports = [self._reports[rank].metrics for rank in sorted(self._reports)]
        self._reports = {}
        models = self.balance.models()
        floor = imbalance_floor(models, plan.batches, plan.micro_batches) if models else None
        row = self.book.end_epoch(
            plan,
            reports,
            emulated=any(device.emulated for device in self._job.devices),
            predicted_step_s=self._predicted_s,
            spread_floor=floor,
        )
        if row is not None:
            self.book.note(
                "epoch", f"epoch {row.epoch + 1} done: {row.samples_per_s:.0f} samples/s"
            )
        previous = self._job.snapshot
        self._job = replace(self._job, snapshot=self._folder / f"epoch-{plan.epoch}.ckpt")
        if previous is not None and previous.parent == self._folder:
            previous.unlink(missing_ok=True)
        self._recoveries = 0
        self.course.end_epoch()
        self._advance()

    # ── failures ──

    def _on_exit(self, exited: Exited) -> None:
        self._alive.discard(exited.peer)
        if exited.peer.generation == self.crew.generation and self._needs_workers():
            self._failures.end(exited)

    def _needs_workers(self) -> bool:
        return self.status.state not in ("new", "failed", "closed")

    def _on_lost_nursery(self, reason: str) -> None:
        self._alive.clear()
        if self._needs_workers():
            self._fail(
                LaunchError(
                    f"the workers' parent process was lost: {reason} run() starts another and goes "
                    "on from the last epoch's end."
                )
            )

    def _on_start_timeout(self) -> None:
        self._fail(
            LaunchError(
                f"the workers had not connected after {START_TIMEOUT_S:.0f} s; the last output of "
                f"rank 0:\n{self._output.tail(0, 20) or '(none)'}"
            )
        )

    def _on_failure(self) -> None:
        if not self._needs_workers():
            return
        cause = self._failures.cause()
        if cause is not None:
            self._fail(revive(cause, self._job.devices[cause.rank].label))
            return
        dead = self._failures.dead()
        died = WorkerDied(self._obituary(dead))
        hopeless = self.status.state in ("ready", "starting")
        if hopeless or self._recoveries >= MOST_RECOVERIES:
            self._fail(died)
        else:
            self._recover(died, dead)

    def _obituary(self, dead: Iterable[int]) -> str:
        text = self._failures.describe([device.label for device in self._job.devices])
        last = "\n".join(self._output.tail(rank, LAST_LINES) for rank in sorted(dead))
        return f"{text}. Its last output:\n{last or '(none)'}"

    def _recover(self, died: WorkerDied, dead: Iterable[int]) -> None:
        self._recoveries += 1
        text = self._failures.describe([device.label for device in self._job.devices])
        self.book.note("failure", text, step=self.course.done, epoch=self.course.epoch)
        self._calls.fail_all(died)
        self._kill()
        self._set("recovering")
        # An emulated death is a single event: its replacement is not told to die again.
        devices = tuple(
            replace(device, emulation=replace(device.emulation, dies_at_step=None))
            if device.emulation is not None and rank in dead
            else device
            for rank, device in enumerate(self._job.devices)
        )
        self._job = replace(self._job, devices=devices)
        self._start()

    def _fail(self, error: Exception) -> None:
        self._start_by = None
        self._calls.fail_all(error)
        self.book.note("failure", f"{type(error).__name__}: {error}", step=self.course.done)
        self._kill()
        self.course.stop()
        self._set("failed", error=error)

    def _kill(self) -> None:
        self.crew.kill()

    # ── status ──

    def _set(self, state: State, **more: Any) -> None:
        self._publish(state=state, **more)

    def _publish(self, **more: Any) -> None:
        course = self.course
        latest = self.book.history.latest
        plan = course.plan
        samples, batch = course.samples, course.settings.global_batch
        steps = plan.epoch_steps if plan else epoch_steps(samples, batch)
        step_s = self.book.recent_step_s()
        left = (course.target - course.epoch) * steps - (course.done - course.epoch_first_step)
        progress = Progress(
            epoch=course.epoch,
            epochs_target=course.target,
            step=course.done,
            epoch_first_step=course.epoch_first_step,
            epoch_steps=steps,
            eta_s=max(0, left) * step_s if step_s and course.at_work else None,
            samples_per_s=latest.samples_per_s if latest else None,
        )
        self._board.post(progress=progress, settled=course.settled, **more)
