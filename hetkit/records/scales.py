"""The scales: how fast the ranks are, what the step costs beside, and what follows from both."""

import logging
from collections.abc import Sequence

from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.planning.balance import Balance
from hetkit.planning.balancer import Decision
from hetkit.planning.batch_split import imbalance_floor, split_batch, step_seconds
from hetkit.planning.course import Course
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.situation import Situation
from hetkit.planning.step_time import ComputeTime, Observation
from hetkit.records.book import Book, Overhead
from hetkit.records.decisions import Decisions, Effect
from hetkit.records.forecast import Forecast
from hetkit.records.report import format_share
from hetkit.records.steps import StepRecord

log = logging.getLogger(__name__)


class Scales:
    """Weighs every step; tells the course how to split, and predicts the next epoch's step.

    Args:
        course: Takes the balancer's splits.
        book: Takes what a re-plan has brought.

    Attributes:
        decisions: What the balancer decided, and what that brought.
        overhead: What the steps cost beside their computing.
        forecast: What was predicted of the present plan's step, beside what comes.
    """

    def __init__(self, course: Course, book: Book) -> None:
        self.decisions = Decisions()
        self.overhead = Overhead()
        self.forecast = Forecast()
        self._course = course
        self._book = book
        self._balance = Balance()
        self._effect = Effect()
        self._kept: Sequence[int | None] | None = None

    @property
    def balances(self) -> bool:
        """Whether the split is the balancer's to choose."""
        return len(self._course.devices) > 1 and self._course.settings.batches == "auto"

    @property
    def hold_at(self) -> int | None:
        """The step that no grant should pass before a decision, while warming up."""
        return self._balance.warm_until if self.balances else None

    def models(self) -> tuple[ComputeTime, ...] | None:
        """Returns each rank's fitted step time; None until all of them are known."""
        return self._balance.models()

    @property
    def error(self) -> float:
        """The standard error of the ranks' compute times, as a share, at the worst rank."""
        return self._balance.error

    def situation(self) -> Situation | None:
        """Returns what was measured under the plan in force; None while that is too little."""
        return self.forecast.situation(self._course.devices, self._balance.paces)

    def exchange_s(self, world_size: int) -> float:
        """Returns the exchange that held the steps up lately, scaled to so many ranks.

        The bytes that each sends in a ring grow with (n − 1)/n; what a round costs beside is not
        known, and taken to be the same.
        """
        measured = len(self._course.devices)
        if measured < 2:
            return 0.0
        return self.overhead.exchange_s * ring_bytes(world_size, 1.0) / ring_bytes(measured, 1.0)

    def seat(self, kept: Sequence[int | None]) -> None:
        """Other devices compute from now on: each was ``kept`` from a rank before, or is new."""
        self._balance.seat(kept)
        earlier = self._kept
        self._kept = [r if r is None or earlier is None else earlier[r] for r in kept]
        self.overhead = Overhead()
        self.forecast.reset()
        models, settings = self.models(), self._course.settings
        if models is None or not self.balances:
            return
        micro_batches = [settings.micro_batch or settings.global_batch] * len(models)
        split = self._best_split(models, settings.global_batch, micro_batches)
        reason = "other devices; from the step times measured so far"
        decision = Decision(reason=reason, outcome="replan", batches=split)
        self.decisions.add(decision, step=self._course.done - 1, batches=())
        self._course.balance(split, reason)

    def restart(self, first_step: int) -> None:
        """The split changes at ``first_step``."""
        self._balance.restart(first_step)
        self._effect.restart()

    def weigh(self, record: StepRecord, rows: tuple[StepRow, ...]) -> None:
        """Takes a step in; once a window is complete, decides on the split."""
        self._balance.add(
            record.step,
            [
                Observation(batch=row.batch, micro_steps=row.micro_steps, compute_s=rank.compute_s)
                if row.batch and rank.compute_s > 0
                else None
                for row, rank in zip(rows, record.ranks, strict=True)
            ],
        )
        self.overhead.add(record)
        self.forecast.add(record, rows)
        plan = self._course.plan
        if plan is None:
            return
        if self._balance.counts(record.step) and record.samples == plan.global_batch:
            self._effect.add(record.step_s)
        if self._balance.full:
            self._close_window(plan, record)

    def _close_window(self, plan: Plan, record: StepRecord) -> None:
        gain = self._effect.window()
        if gain is not None:
            self._measured(gain, record)
        if not self.balances:
            self._balance.learn(plan)
            return
        decision = self._balance.decide(
            plan, comm_s=self.overhead.all_s, granularity=self._unit(plan.global_batch)
        )
        self._decided(decision, record.step, plan.batches)

    def _measured(self, gain: float, record: StepRecord) -> None:
        self.decisions.measure(gain)
        made = self.decisions.replans[-1]
        promise = "" if made.predicted_gain is None else f", {made.predicted_gain:.1%} predicted"
        split = list(made.new_batches or ())
        self._book.note("balance", f"split {split} gained {gain:.1%}{promise}", record)

    def _decided(self, decision: Decision, step: int, batches: tuple[int, ...]) -> None:
        self.decisions.add(decision, step=step, batches=batches)
        split = decision.batches
        log.log(
            logging.DEBUG if split is None else logging.INFO,
            "balancer after step %d, %s → %s, predicted gain %s: %s",
            step,
            batches,
            split or "stay",
            format_share(decision.predicted_gain),
            decision.reason,
        )
        if split is not None:
            self._effect.expect(split)
            self._course.balance(split, decision.reason)

    def _best_split(
        self, models: Sequence[ComputeTime], total: int, micro_batches: Sequence[int]
    ) -> tuple[int, ...]:
        return split_batch(
            models,
            total,
            micro_batches=micro_batches,
            floors=[1] * len(models),
            granularity=self._unit(total),
        )

    def _unit(self, total: int) -> int:
        # A micro-batch that the user fixed is the same on every device: whole ones are shared.
        micro_batch, ranks = self._course.settings.micro_batch, len(self._course.devices)
        return micro_batch if micro_batch is not None and micro_batch * ranks <= total else 1

    def take_over(self) -> None:
        """The split, or in which pieces, is the balancer's from now on: what is known is enough."""
        models, course = self.models(), self._course
        if models is None or len(models) != len(course.devices):
            return
        total = course.settings.global_batch
        split = self._best_split(
            models, total, [course.settings.micro_batch or total] * len(models)
        )
        reason, before = "from the step times measured so far", course.plan
        if before is None:  # between two epochs: nothing runs that it could be compared with
            decision = Decision(reason=reason, outcome="replan", batches=split)
            self._decided(decision, course.done - 1, course.balanced or split)
            return
        over_s = self.overhead.all_s
        now_s = step_seconds(models, before.batches, before.micro_batches) + over_s
        new_s = step_seconds(models, split, before.micro_batches) + over_s
        decision = Decision(
            reason=reason,
            outcome="balanced" if split == before.batches else "replan",
            batches=None if split == before.batches else split,
            predicted_gain=1 - new_s / now_s,
            now_s=now_s,
            new_s=new_s,
        )
        self._decided(decision, course.done - 1, before.batches)

    def on_plan(self, before: Plan | None, plan: Plan) -> None:
        """A new plan is about to begin: predicts its step, and forgets what it invalidates."""
        self.forecast.begin(plan, self.situation())
        kept, self._kept = self._kept or range(plan.world_size), None
        if before is not None and _precision(before, kept, plan) != (plan.amp, plan.tf32):
            self._balance.forget()
            self._balance.restart(plan.first_step)
        if before is None or before.batches != plan.batches:
            self._balance.restart(plan.first_step)
            self._effect.restart()
        self._effect.begins(plan.batches, alike=before is not None and _alike(before, plan))
        self._mark_measuring(before, plan)

    def _mark_measuring(self, before: Plan | None, plan: Plan) -> None:
        """Says in the ledger that the epoch is not yet the balanced split's."""
        begins = plan.first_step == plan.epoch_first_step or before is None
        if begins and self.balances and self._balance.undecided:
            text = (
                "measuring: the devices are timed on the first steps, so samples/s is not yet that "
                "of the balanced split"
            )
            self._book.note("balance", text, step=plan.first_step, epoch=plan.epoch)

    def spread_floor(self, plan: Plan) -> float | None:
        """Returns the smallest spread of compute times that whole samples allow, where known."""
        models = self.models()
        if models is None:
            return None
        return imbalance_floor(models, plan.batches, plan.micro_batches)


def _precision(
    before: Plan, kept: Sequence[int | None], plan: Plan
) -> tuple[tuple[str, ...], bool]:
    """Returns the precision before of the plan's ranks; of a new rank the plan's own."""
    amp = (plan.amp[at] if rank is None else before.amp[rank] for at, rank in enumerate(kept))
    return tuple(amp), before.tf32


def _alike(before: Plan, plan: Plan) -> bool:
    """Whether two plans differ in nothing but their split, as far as a step's time goes."""
    names = ("amp", "tf32", "compression", "global_batch", "bucket_bytes", "sync_every")
    return all(getattr(before, name) == getattr(plan, name) for name in names)
