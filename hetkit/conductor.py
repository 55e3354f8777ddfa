"""The conductor: what happens when workers speak, finish, or die. Decides nothing about splits.

What to tell the ranks is decided by the `Course`, how fast they are by the `Scales`, what to write
down is written by the `Book`. All of it runs on one thread, the `Coordinator`'s.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetkit.errors import HetkitError, LaunchError, PlanError, WorkerDied
from hetkit.launch import messages as m
from hetkit.launch.calls import Calls
from hetkit.launch.channel import Peer
from hetkit.launch.crew import Crew, Job
from hetkit.launch.failures import Failures, revive
from hetkit.launch.orders import Exited
from hetkit.launch.output import OutputLog
from hetkit.planning.course import Course, FinishEpoch, GrantUntil, NewPlan
from hetkit.planning.memory import MemoryModel, largest_micro_batch
from hetkit.planning.schedule import Position
from hetkit.records.board import Board
from hetkit.records.book import Book
from hetkit.records.progress import progress_of
from hetkit.records.scales import Scales
from hetkit.records.status import State, Status
from hetkit.settings import Settings

START_TIMEOUT_S = 120.0
"""How long the workers' processes may take to connect."""

LAST_LINES = 80
"""Of a dead worker's output: a fault in native code prints the stack of each of its threads."""

MOST_RECOVERIES = 3
"""Deaths without a finished epoch in between before the session gives up."""


class Conductor:
    """Leads one session's workers from their start to their end. Not thread-safe.

    Args:
        crew: The session's workers.
        job: What the workers are started for.
        settings: What the user wants at first.
        book: Takes steps, events and epochs.
        output: Takes what the workers print.
        folder: The session's private folder, for snapshots.
    """

    def __init__(
        self,
        crew: Crew,
        job: Job,
        settings: Settings,
        book: Book,
        output: OutputLog,
        folder: Path,
    ) -> None:
        self.crew = crew
        self.job = job
        self.book = book
        self.output = output
        self.board = Board()
        self.calls = Calls()
        self.course = Course(job.devices, settings)
        self.scales = Scales(self.course, self.book)
        self.alive: set[Peer] = set()
        self.figures: dict[str, float | None] = {}
        self.upon_start: list[Callable[[], None]] = []
        self._folder = folder
        self._reports: dict[int, m.EpochReport] = {}
        self._failures = Failures()
        self._start_by: float | None = None
        self._recoveries = 0
        self._finished: set[int] = set()
        self._caps: dict[str, int] = {}
        self._lost_to_memory: set[int] = set()

    @property
    def status(self) -> Status:
        """Where the session stands."""
        return self.board.status

    # ── status ──

    def set_state(self, state: State, **more: Any) -> None:
        """Changes the session's state, and posts how far it is."""
        progress = progress_of(self.course, self.book)
        self.board.post(state=state, progress=progress, settled=self.course.settled, **more)

    # ── workers ──

    def start(self) -> None:
        """Starts the next generation of workers; they go on from the last snapshot."""
        self._failures, self._reports, self._finished = Failures(), {}, set()
        self._lost_to_memory = set()
        self.course.limit, self.course.ended = None, False
        self._start_by = time.monotonic() + START_TIMEOUT_S
        devices = tuple(device.with_figures(self.figures) for device in self.job.devices)
        global_batch = self.course.settings.global_batch
        try:
            self.crew.start(replace(self.job, devices=devices, global_batch=global_batch))
        except HetkitError as error:
            self.fail(error)
            return
        if self.crew.forks:
            ranks = range(len(self.job.devices))
            self.alive = {Peer(self.crew.generation, rank) for rank in ranks}

    def hear(self, peer: Peer, message: m.Message) -> None:
        """Takes a worker's message."""
        match message:
            case m.Hello() | m.StoreReady() | m.Ready():
                try:
                    readies = self.crew.hear(peer, message)
                except LaunchError as error:
                    self.fail(error)
                    return
                if self.crew.all_here:
                    self._start_by = None  # how long the user's own code takes, only the user knows
                if readies is not None:
                    self._on_ready(readies)
            case m.Progress():
                self._on_progress(message)
            case m.EpochReport():
                self._on_report(message)
            case m.Finished():
                self._on_finished(message)
            case m.Answer():
                self.calls.answered(message)
            case m.Saved():
                self.calls.saved(message)
            case m.MemoryCap():
                self._on_cap(message)
            case m.Notice():
                self.book.note("notice", message.text, step=message.step, rank=message.rank)
            case m.Failed():
                self._failures.report(message)

    def _on_ready(self, readies: tuple[m.Ready, ...]) -> None:
        first = readies[0]
        # An emulated device stays as fast as it was first found, whoever computes beside it.
        self.figures = {
            "sample_s": first.sample_s,
            "fixed_bytes": None if first.fixed_bytes is None else int(first.fixed_bytes),
            "sample_bytes": first.sample_bytes,
        }
        position = Position(
            epoch=first.epoch,
            step=first.step,
            epoch_first_step=first.epoch_first_step,
            samples=first.samples,
        )
        try:
            caps = tuple(self._cap(ready) for ready in readies)
        except HetkitError as error:
            self.fail(error)
            return
        plan = self.status.plan
        if plan and plan.epoch == first.epoch:
            self.book.roll_back(first.step)  # the epoch had begun
        if self.status.state == "recovering":
            self.book.note(
                "recovery",
                f"training goes on from step {first.step}",
                step=first.step,
                epoch=first.epoch,
            )
        self.course.limit = first.epochs
        self.course.stand(position, caps if any(cap is not None for cap in caps) else None)
        self.scales.restart(first.step)
        for command in self.upon_start:
            command()
        self.upon_start = []
        self.set_state("running")
        self.advance()

    def _cap(self, ready: m.Ready) -> int | None:
        caps = (self._caps.get(self.job.devices[ready.rank].key), self._emulated_cap(ready))
        return min((cap for cap in caps if cap is not None), default=None)

    def _emulated_cap(self, ready: m.Ready) -> int | None:
        emulation = self.job.devices[ready.rank].emulation
        if emulation is None or emulation.memory_bytes is None or ready.sample_bytes is None:
            return None
        model = MemoryModel(fixed_bytes=ready.fixed_bytes or 0.0, sample_bytes=ready.sample_bytes)
        try:
            return largest_micro_batch(model, emulation.memory_bytes)
        except PlanError as error:
            error.add_note(f"on rank {ready.rank} ({self.job.devices[ready.rank].label})")
            raise

    def advance(self) -> None:
        """Tells the ranks what the course says, and posts what state that is."""
        state = self.status.state
        if state in ("running", "paused", "ready"):
            for order in self.course.orders(self.book.recent_step_s(), self.scales.hold_at):
                self._order(order)
            if self.course.finished:
                state = "ready"
            elif self.course.paused and self.course.settled:
                state = "paused"
            elif self.course.at_work:
                state = "running"
        self.set_state(state)

    def _order(self, order: NewPlan | GrantUntil | FinishEpoch) -> None:
        match order:
            case NewPlan():
                self._begin_plan(order)
            case GrantUntil(until=until):
                self.crew.tell(m.Grant(until=until))
            case FinishEpoch(epoch=epoch):
                path = self._folder / f"epoch-{epoch}.ckpt"
                self.crew.tell(m.EndEpoch(epoch=epoch, snapshot=str(path)))

    def _begin_plan(self, order: NewPlan) -> None:
        plan = order.plan
        if plan.first_step == plan.epoch_first_step:
            self.book.begin_epoch(order.changes)
        else:
            text = f"split {list(plan.batches)} from step {plan.first_step}: {plan.reason}"
            self.book.note("plan", text, step=plan.first_step, epoch=plan.epoch)
        before = self.status.plan
        if plan.local and (before is None or before.sync_every != plan.sync_every):
            text = (
                f"local steps: the devices train on their own and average every {plan.sync_every} "
                "steps, which is not the maths of one process"
            )
            self.book.note("notice", text, step=plan.first_step, epoch=plan.epoch)
        self.scales.on_plan(before, plan)
        self.crew.tell(m.SetPlan(plan=plan))
        self.board.post(plan=plan, applied=self.course.applied)
        for change in order.changes:
            self.book.note("settings", change, step=plan.first_step, epoch=plan.epoch)

    # ── progress ──

    def _on_progress(self, message: m.Progress) -> None:
        whole = self.book.take(message.rank, message.rows)
        self.course.progress(message.rank, message.rows[-1].step + 1)
        for record, rows in whole:
            self.scales.weigh(record, rows)
        self.advance()

    def _on_report(self, message: m.EpochReport) -> None:
        self._reports[message.rank] = message
        plan = self.course.plan
        if len(self._reports) < len(self.job.devices) or plan is None:
            return
        reports = [self._reports[rank].metrics for rank in sorted(self._reports)]
        self._reports = {}
        row = self.book.end_epoch(
            plan,
            reports,
            emulated=any(device.emulated for device in self.job.devices),
            forecast=self.scales.forecast.close_epoch(),
            spread_floor=self.scales.spread_floor(plan),
        )
        if row is not None:
            self.book.note(
                "epoch", f"epoch {row.epoch + 1} done: {row.samples_per_s:.0f} samples/s"
            )
        previous = self.job.snapshot
        self.job = replace(self.job, snapshot=self._folder / f"epoch-{plan.epoch}.ckpt")
        if previous is not None and previous.parent == self._folder:
            previous.unlink(missing_ok=True)
        self._recoveries = 0
        self.course.end_epoch()
        self.advance()

    def _on_finished(self, message: m.Finished) -> None:
        self._finished.add(message.rank)
        if len(self._finished) == len(self.job.devices):
            self.course.end()
            self.advance()

    def _on_cap(self, message: m.MemoryCap) -> None:
        device = self.job.devices[message.rank]
        self._caps[device.key] = message.micro_batch
        self.course.cap(message.rank, message.micro_batch)
        who = f"rank {message.rank} ({device.label})"
        text = f"{who} holds at most {message.micro_batch} samples a micro-batch, by its peaks"
        if message.tried is not None:
            text = (
                f"{who} ran out of memory at micro-batch {message.tried}: from now on at most "
                f"{message.micro_batch}"
            )
        self.book.note("notice", text, step=message.step, rank=message.rank)
        if message.lost:
            self._lost_to_memory.add(message.rank)
        self.advance()

    # ── failures ──

    def on_exit(self, exited: Exited) -> None:
        """A worker's process has ended."""
        self.alive.discard(exited.peer)
        if exited.peer.generation == self.crew.generation and self._needs_workers():
            self._failures.end(exited)

    def _needs_workers(self) -> bool:
        return self.status.state not in ("new", "failed", "closed")

    def on_lost_nursery(self, reason: str) -> None:
        """The workers' parent process is gone, and they with it."""
        self.alive.clear()
        if self._needs_workers():
            self.fail(
                LaunchError(
                    f"the workers' parent process was lost: {reason} run() starts another and goes "
                    "on from the last epoch's end."
                )
            )

    def _on_start_timeout(self) -> None:
        self.fail(
            LaunchError(
                f"the workers had not connected after {START_TIMEOUT_S:.0f} s; the last output of "
                f"rank 0:\n{self.output.tail(0, 20) or '(none)'}"
            )
        )

    def _on_failure(self) -> None:
        if not self._needs_workers():
            return
        cause = self._failures.cause()
        if cause is not None and cause.rank in self._lost_to_memory:
            # Not counted as a recovery: each one halves a micro-batch, so they come to an end.
            error = revive(cause, self.job.devices[cause.rank].label)
            self._begin_again(error, f"rank {cause.rank} gave up: {cause.text}")
            return
        if cause is not None:
            self.fail(revive(cause, self.job.devices[cause.rank].label))
            return
        dead = self._failures.dead()
        died = WorkerDied(self._obituary(dead))
        hopeless = self.status.state in ("ready", "starting")
        if hopeless or self._recoveries >= MOST_RECOVERIES:
            self.fail(died)
        else:
            self._recover(died, dead)

    def _obituary(self, dead: Iterable[int]) -> str:
        text = self._failures.describe([device.label for device in self.job.devices])
        last = "\n".join(self.output.tail(rank, LAST_LINES) for rank in sorted(dead))
        return f"{text}. Its last output:\n{last or '(none)'}"

    def _recover(self, died: WorkerDied, dead: Iterable[int]) -> None:
        self._recoveries += 1
        text = self._failures.describe([device.label for device in self.job.devices])
        # An emulated death is a single event: its replacement is not told to die again.
        devices = tuple(
            replace(device, emulation=replace(device.emulation, dies_at_step=None))
            if device.emulation is not None and rank in dead
            else device
            for rank, device in enumerate(self.job.devices)
        )
        self.job = replace(self.job, devices=devices)
        self._begin_again(died, text)

    def _begin_again(self, error: Exception, text: str) -> None:
        self.book.note("failure", text, step=self.course.done, epoch=self.course.epoch)
        self.calls.fail_all(error)
        self.crew.kill()
        self.set_state("recovering")
        self.start()

    def fail(self, error: Exception) -> None:
        """Ends the workers; the session has failed with ``error``, and can be run again."""
        self._start_by = None
        self.calls.fail_all(error)
        self.book.note("failure", f"{type(error).__name__}: {error}", step=self.course.done)
        self.crew.kill()
        self.course.stop()
        self.set_state("failed", error=error)

    def look_at_the_clock(self) -> None:
        """Acts on what has been waited for long enough."""
        if self._failures.due():
            self._failures.settle()
            self._on_failure()
        elif self._start_by is not None and time.monotonic() >= self._start_by:
            self._on_start_timeout()
