"""The scales: how fast the ranks are, what the step costs beside, and what follows from both."""

import logging
from collections.abc import Sequence

from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.planning.balance import Balance
from hetkit.planning.batch_split import imbalance_floor, split_batch, step_seconds
from hetkit.planning.course import Course
from hetkit.planning.step_time import Observation, StepTime
from hetkit.records.book import Overhead
from hetkit.records.steps import StepRecord

log = logging.getLogger(__name__)


class Scales:
    """Weighs every step; tells the course how to split, and predicts the next epoch's step.

    Args:
        course: Takes the balancer's splits.
    """

    def __init__(self, course: Course) -> None:
        self.overhead = Overhead()
        self.predicted_s: float | None = None
        self._course = course
        self._balance = Balance()

    @property
    def balances(self) -> bool:
        """Whether the split is the balancer's to choose."""
        return len(self._course.devices) > 1 and self._course.settings.batches == "auto"

    @property
    def hold_at(self) -> int | None:
        """The step that no grant should pass before a decision, while warming up."""
        return self._balance.warm_until if self.balances else None

    def models(self) -> tuple[StepTime, ...] | None:
        """Returns each rank's fitted step time; None until all of them are known."""
        return self._balance.models()

    def seat(self, kept: Sequence[int | None]) -> None:
        """Other devices compute from now on: each was ``kept`` from a rank before, or is new."""
        self._balance.seat(kept)
        self.overhead = Overhead()
        if self.balances:
            self.take_over()

    def restart(self, first_step: int) -> None:
        """The split changes at ``first_step``."""
        self._balance.restart(first_step)

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
        plan = self._course.plan
        if not self._balance.full or plan is None:
            return
        if not self.balances:
            self._balance.learn(plan)
            return
        decision = self._balance.decide(plan, comm_s=self.overhead.all_s)
        log.debug("balancer: %s", decision.reason)
        if decision.batches is not None:
            self._course.balance(decision.batches, decision.reason)

    def take_over(self) -> None:
        """The split has just been left to the balancer: what is known by now is enough to begin."""
        models, plan = self.models(), self._course.plan
        if models is not None and plan is not None:
            split = split_batch(models, plan.global_batch, micro_batches=plan.micro_batches)
            self._course.balance(split, "from the step times measured so far")

    def on_plan(self, before: Plan | None, plan: Plan) -> None:
        """A new plan is about to begin: forgets what it invalidates, and predicts its step."""
        if before is not None and (before.amp, before.tf32) != (plan.amp, plan.tf32):
            self._balance.forget()
            self._balance.restart(plan.first_step)
        models = self.models()
        self.predicted_s = None
        if models is not None:
            compute_s = step_seconds(models, plan.batches, plan.micro_batches)
            self.predicted_s = compute_s + self.overhead.all_s
        if before is None or before.batches != plan.batches:
            self._balance.restart(plan.first_step)

    def spread_floor(self, plan: Plan) -> float | None:
        """Returns the smallest spread of compute times that whole samples allow, where known."""
        models = self.models()
        if models is None:
            return None
        return imbalance_floor(models, plan.batches, plan.micro_batches)
