"""Plan: what each rank does from one step on. Made by the coordinator, obeyed by the workers."""

from dataclasses import dataclass

from hetkit.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What each rank does from ``first_step`` on, until the next plan.

    All ranks get the same plan, so each can tell what every other does with the same step.

    Args:
        version: Counts the plans of a session from 1.
        epoch: The epoch that the plan belongs to, from 0.
        first_step: The first step that the plan is for, counted over the whole session.
        epoch_first_step: The first step of the epoch.
        epoch_steps: Steps in the epoch; the last may be smaller than the others.
        global_batch: Samples in a full step, over all ranks.
        batches: Samples per rank in a full step; their sum is ``global_batch``.
        micro_batches: Largest forward pass per rank, in samples.
        amp: Precision per rank: ``"off"``, ``"bf16"`` or ``"fp16"``.
        compression: The gradient codec's text, see `hetkit.compression`.
        guard_every: Steps between two looks of the guard; 0 for none.
        hierarchy: The islands inside which gradients are summed first, as ranks; empty: none.
        tf32: Whether float32 matrix products may run in TF32.
        lr: Learning rate for every parameter group, or None for the task's own.
        lr_factor: Factor on the task's own learning rate, or None.
        lr_rule: How the task's own learning rate follows the global batch: one of
            `hetkit.settings.LR_RULES`.
        clip_norm: Largest norm of the gradient, or None.
        bucket_bytes: Size of DDP's gradient buckets, or None for PyTorch's default.
        sync_every: Steps after which the ranks average; 1: they share every gradient.
        outer_momentum: Momentum of those averages.
        reason: Why this plan was made, for a person to read.

    Raises:
        PlanError: The parts contradict each other.

    Example:
        >>> from hetkit.plan import Plan
        >>> plan = Plan(version=1, epoch=0, first_step=0, epoch_first_step=0, epoch_steps=10,
        ...             global_batch=64, batches=(48, 16), micro_batches=(48, 16),
        ...             amp=("off", "off"), compression="none", reason="even")
        >>> plan.last_step
        9
    """

    version: int
    epoch: int
    first_step: int
    epoch_first_step: int
    epoch_steps: int
    global_batch: int
    batches: tuple[int, ...]
    micro_batches: tuple[int, ...]
    amp: tuple[str, ...]
    compression: str
    guard_every: int = 0
    hierarchy: tuple[tuple[int, ...], ...] = ()
    tf32: bool = False
    lr: float | None = None
    lr_factor: float | None = None
    lr_rule: str = "none"
    clip_norm: float | None = None
    bucket_bytes: int | None = None
    sync_every: int = 1
    outer_momentum: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 0:
            raise PlanError(f"batches must be one number of at least 0 per rank: {self.batches}.")
        if sum(self.batches) != self.global_batch:
            raise PlanError(f"batches {self.batches} do not sum to {self.global_batch}.")
        if not len(self.batches) == len(self.micro_batches) == len(self.amp):
            raise PlanError("batches, micro_batches and amp must have one value per rank.")
        if self.sync_every < 1:
            raise PlanError(f"sync_every must be at least 1, not {self.sync_every}.")
        if min(self.micro_batches) < 1:
            raise PlanError(f"micro_batches must be at least 1: {self.micro_batches}.")
        if not self.epoch_first_step <= self.first_step < self.epoch_first_step + self.epoch_steps:
            raise PlanError(
                f"step {self.first_step} is not one of the epoch's {self.epoch_steps} steps "
                f"from {self.epoch_first_step}."
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.batches)

    @property
    def last_step(self) -> int:
        """The epoch's last step."""
        return self.epoch_first_step + self.epoch_steps - 1

    @property
    def local(self) -> bool:
        """Whether the ranks make steps of their own between two synchronisations."""
        return self.sync_every > 1

    def next_sync(self, step: int) -> int:
        """Returns the first step from ``step`` on after which the ranks stand alike.

        That is every ``sync_every``-th step of the epoch, and its last.
        """
        rest = (self.epoch_first_step - step - 1) % self.sync_every
        return min(step + rest, self.last_step)
