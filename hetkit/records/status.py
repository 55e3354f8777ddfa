"""Where a session stands: one frozen record, swapped whole, so nobody reads half of it."""

from dataclasses import dataclass, field
from typing import Literal

from hetkit.plan import Plan
from hetkit.settings import Settings

State = Literal["new", "starting", "ready", "running", "paused", "recovering", "failed", "closed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the training is. Epochs and steps count from 0 over the whole session.

    Args:
        epoch: The epoch being trained, or the next one.
        epochs_target: The epoch at which the run ends.
        step: Steps done by all ranks.
        epoch_first_step: The epoch's first step.
        epoch_steps: Steps in the epoch; 0 before it is known.
        eta_s: Seconds to the end of the run at the present speed; None before it is known.
        samples_per_s: Throughput of the last few steps; None before there are any.

    Example:
        >>> Progress(epoch=1, epochs_target=2, step=15, epoch_first_step=10, epoch_steps=10).done
        0.75
    """

    epoch: int = 0
    epochs_target: int = 0
    step: int = 0
    epoch_first_step: int = 0
    epoch_steps: int = 0
    eta_s: float | None = None
    samples_per_s: float | None = None

    @property
    def done(self) -> float:
        """Epochs done, parts included, as a share of the target."""
        part = (self.step - self.epoch_first_step) / self.epoch_steps if self.epoch_steps else 0.0
        return min(1.0, (self.epoch + part) / self.epochs_target) if self.epochs_target else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a session stands.

    Args:
        state: What it is doing.
        applied: The settings in force; None before the first plan.
        plan: The plan in force; None before the first.
        progress: How far the training is.
        error: What made it fail; None otherwise.
        settled: No rank is executing anything that was granted.
    """

    state: State = "new"
    applied: Settings | None = None
    plan: Plan | None = None
    progress: Progress = field(default_factory=Progress)
    error: BaseException | None = None
    settled: bool = True
