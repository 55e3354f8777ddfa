"""The records that make up a history: a rank's step, the step of all ranks, an event."""

from dataclasses import dataclass
from typing import Literal, get_args

EventKind = Literal[
    "settings", "plan", "balance", "epoch", "skip", "failure", "recovery", "notice", "output"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One rank's account of one step; the parts of the time split add up to ``step_s``.

    Args:
        step: Number of the step, counted over the whole session.
        epoch: Number of the epoch, from 0.
        rank: The rank.
        time_s: When the step ended, in seconds since the session's first step.
        batch: Samples that the rank computed.
        step_s: The whole step.
        data_s: Fetching and moving samples.
        compute_s: Forward and backward.
        wait_s: Waiting for the slowest rank.
        transfer_s: Exchange that held the step up.
        codec_s: Encoding and decoding that held the step up.
        optimizer_s: Clipping and the optimizer's step.
        other_s: What the parts above do not explain: the honesty check.
        overlapped_s: Exchange that ran beside the computing; not part of the sum.
        wire_bytes: Bytes that the rank sent.
        memory_bytes: Device memory in use, or None where there is no reading.
        memory_peak_bytes: Largest device memory in use so far, or None.
        loss: Mean loss over the rank's samples, or None.

    Raises:
        ValueError: ``step_s`` is not above 0.
    """

    step: int
    epoch: int
    rank: int
    time_s: float
    batch: int
    step_s: float
    data_s: float
    compute_s: float
    wait_s: float
    transfer_s: float
    codec_s: float
    optimizer_s: float
    other_s: float
    overlapped_s: float
    wire_bytes: float
    memory_bytes: float | None = None
    memory_peak_bytes: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise ValueError(f"step_s must be above 0, not {self.step_s!r} (rank {self.rank}).")

    @property
    def samples_per_s(self) -> float:
        """What the rank contributes to the throughput: batch / step."""
        return self.batch / self.step_s

    @property
    def pace(self) -> float | None:
        """What the rank could do if it never waited: batch / compute; None when it is idle."""
        return self.batch / self.compute_s if self.compute_s > 0 else None

    @property
    def comm_share(self) -> float:
        """(wait + exposed transfer + codec) / step (DESIGN.md §6)."""
        return (self.wait_s + self.transfer_s + self.codec_s) / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of all ranks.

    Args:
        step: Number of the step, counted over the whole session.
        epoch: Number of the epoch, from 0.
        time_s: When the step ended, in seconds since the session's first step.
        samples: Samples over all ranks.
        loss: Mean loss over all samples, or None.
        skipped: Whether a non-finite gradient made all ranks (with local steps, any) skip the
            optimizer's step.
        loss_scale: What fp16 ranks multiply their loss by after this step; None without fp16. With
            local steps the smallest over the ranks.
        lr: The first parameter group's learning rate in this step, or None.
        guard_cosine: Cosine of the compressed gradient to the true one, in the steps in which the
            guard looked (`hetkit.worker.guard`), else None.
        guard_error: The compressed gradient's distance from the true one, relative to it, or None.
        ranks: The account of each rank that took part, in rank order.

    Raises:
        ValueError: No rank took part.
    """

    step: int
    epoch: int
    time_s: float
    samples: int
    loss: float | None
    skipped: bool
    loss_scale: float | None = None
    lr: float | None = None
    guard_cosine: float | None = None
    guard_error: float | None = None
    ranks: tuple[RankStep, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError(f"step {self.step} has no ranks: at least one must have taken part.")

    @property
    def step_s(self) -> float:
        """The step's duration: the longest over the ranks."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.samples / self.step_s

    @property
    def critical(self) -> RankStep:
        """The rank that the others wait for: the one that computed longest."""
        return max(self.ranks, key=lambda rank: rank.compute_s)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sent; of the rank that sent most."""
        return max(rank.wire_bytes for rank in self.ranks)

    @property
    def comm_share(self) -> float:
        """Communication share of the critical rank.

        A faster rank's share also holds the time it waits for the critical one, which is
        imbalance, not communication.
        """
        return self.critical.comm_share

    @property
    def compute_spread(self) -> float:
        """(longest − shortest) / longest compute time of the ranks that had samples; 0 for one."""
        times = [rank.compute_s for rank in self.ranks if rank.batch > 0]
        longest = max(times, default=0.0)
        return (longest - min(times)) / longest if longest > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened at a step, for a person to read.

    Args:
        step: The step that it belongs to.
        epoch: The epoch that it belongs to.
        time_s: When, in seconds since the session's first step.
        kind: One of `EventKind`'s names.
        text: What happened.
        rank: The rank it happened on, or None for all.

    Raises:
        ValueError: ``kind`` is not one of the kinds.
    """

    step: int
    epoch: int
    time_s: float
    kind: EventKind
    text: str
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(EventKind):
            raise ValueError(f"kind must be one of {get_args(EventKind)}, not {self.kind!r}.")
