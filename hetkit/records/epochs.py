"""One epoch's account: what was measured, beside what was set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from statistics import fmean, median
from typing import Self

from hetkit.plan import Plan
from hetkit.records.noise import Noise, measure_noise
from hetkit.records.steps import RankStep, StepRecord

SPLIT = ("data", "compute", "wait", "transfer", "codec", "optimizer", "other")
"""The parts of a step, in order; ``<part>_s`` of a rank add up to its ``step_s``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSummary:
    """What was measured over an epoch. Medians are over its steps; tuples are per rank.

    Where the ranks synchronise every few steps only, no single step is typical: then means stand
    in the medians' places.

    Args:
        epoch: Number of the epoch, from 0.
        first_step: Its first step, counted over the whole session.
        last_step: Its last step.
        seconds: Sum of its steps' durations, of the slowest rank: pauses and validation do not
            count.
        samples: Samples over all ranks and steps, those of skipped steps included.
        samples_per_s: ``samples / seconds``.
        step_s: Median step.
        data_s: Median time of fetching and moving samples.
        compute_s: Median time of forward and backward.
        wait_s: Median time of waiting for the slowest rank.
        transfer_s: Median time of the exchange that held the step up.
        codec_s: Median time of encoding and decoding that held the step up.
        optimizer_s: Median time of the optimizer's step.
        other_s: Median of what the parts do not explain.
        overlapped_s: Median time of the exchange that ran beside the computing.
        ranks: Those that took part, by their place in the fleet; the tuples are in this order.
        critical_rank: The rank that the others wait for: the largest median compute time.
        comm_share: Median communication share of the critical rank.
        compute_spread: (largest − smallest) / largest median compute time, over the ranks that
            had samples.
        wire_bytes: Median bytes that a rank sent in a step; of the rank that sent most.
        memory_peak_bytes: Largest reading, or None where there is none.
        loss: Mean training loss, weighted by samples; None where no step had one.
        skipped_steps: Steps that a non-finite gradient made all ranks (with local steps, any) skip.
        loss_scale: What fp16 ranks multiply their loss by at the epoch's end; None without fp16.
        lr: The first parameter group's learning rate in the epoch's last step, or None where it is
            not known.
        guard_cosine: Smallest cosine of the compressed gradient to the true one, of the steps in
            which the guard looked; None where it did not.
        guard_error: Largest relative error of the compressed gradient in those steps, or None.
        noise: How far figures would scatter if the epoch were measured again, by field
            (`hetkit.records.noise`).
    """

    epoch: int
    first_step: int
    last_step: int
    seconds: float
    samples: int
    samples_per_s: float
    step_s: float
    data_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    codec_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    other_s: tuple[float, ...]
    overlapped_s: tuple[float, ...]
    ranks: tuple[int, ...]
    critical_rank: int
    comm_share: float
    compute_spread: float
    wire_bytes: float
    memory_peak_bytes: tuple[float | None, ...]
    loss: float | None
    skipped_steps: int
    loss_scale: float | None = None
    lr: float | None = None
    guard_cosine: float | None = None
    guard_error: float | None = None
    noise: Mapping[str, Noise] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow(EpochSummary):
    """One epoch in the ledger: the settings in force, and what was measured under them.

    Args:
        global_batch: Samples in a full step, over all ranks.
        batches: Samples per rank in a full step, at the epoch's end.
        micro_batches: Largest forward pass per rank, in samples.
        amp: Precision per rank.
        compression: Name of the gradient codec.
        sync_every: Steps between two synchronisations; above 1 the maths is another than one
            process's.
        spread_floor: Smallest ``compute_spread`` that whole samples allow, max cᵢ/τ (DESIGN.md
            §6), or None where it is not known.
        metrics: Validation metrics by name; ``"loss"`` is the validation loss.
        predicted_step_s: The step as predicted before its plan began, or None.
        predicted_low_s, predicted_high_s: Where the median step was expected, 19 times in 20.
        prediction_error: Predicted / measured − 1, of the steps under that plan; None where one of
            the two is missing.
        emulated: Whether any device is emulated: then times and memory are emulated figures.
        changes: What was switched at the epoch's start.
        events: What else happened.

    Example:
        >>> from hetkit.records.steps import RankStep
        >>> rank = RankStep(step=0, epoch=0, rank=0, time_s=0.25, batch=32, step_s=0.25,
        ...                 data_s=0.01, compute_s=0.16, wait_s=0.0, transfer_s=0.05, codec_s=0.0,
        ...                 optimizer_s=0.02, other_s=0.01, overlapped_s=0.1, wire_bytes=1024.0)
        >>> step = StepRecord(step=0, epoch=0, time_s=0.25, samples=32, loss=2.3, skipped=False,
        ...                   ranks=(rank,))
        >>> plan = Plan(version=1, epoch=0, first_step=0, epoch_first_step=0, epoch_steps=1,
        ...             global_batch=32, batches=(32,), micro_batches=(32,), amp=("off",),
        ...             compression="none")
        >>> row = LedgerRow.of(summarise_epoch([step]), plan, emulated=True)
        >>> row.batches, row.samples_per_s, round(row.comm_share, 3)
        ((32,), 128.0, 0.2)
    """

    global_batch: int
    batches: tuple[int, ...]
    micro_batches: tuple[int, ...]
    amp: tuple[str, ...]
    compression: str
    sync_every: int = 1
    spread_floor: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    predicted_step_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    prediction_error: float | None = None
    emulated: bool = False
    changes: tuple[str, ...] = ()
    events: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        summary: EpochSummary,
        plan: Plan,
        *,
        emulated: bool,
        places: Sequence[int] | None = None,
        spread_floor: float | None = None,
        metrics: Mapping[str, float] | None = None,
        predicted_step_s: float | None = None,
        predicted_low_s: float | None = None,
        predicted_high_s: float | None = None,
        prediction_error: float | None = None,
        changes: Sequence[str] = (),
        events: Sequence[str] = (),
    ) -> Self:
        """Returns the row of an epoch that ended under ``plan``, on the devices at ``places``.

        A device that was dropped in mid-epoch has no samples in the row.
        """
        rows = list(zip(plan.batches, plan.micro_batches, plan.amp, strict=True))
        if places is not None and tuple(places) != summary.ranks:
            by_place = dict(zip(places, rows, strict=True))
            rows = [by_place.get(place, (0, 0, "off")) for place in summary.ranks]
        batches, micro_batches, amp = zip(*rows, strict=True)
        return cls(
            **{part.name: getattr(summary, part.name) for part in fields(EpochSummary)},
            global_batch=plan.global_batch,
            batches=batches,
            micro_batches=micro_batches,
            amp=amp,
            compression=plan.compression,
            sync_every=plan.sync_every,
            spread_floor=spread_floor,
            metrics=dict(metrics or {}),
            predicted_step_s=predicted_step_s,
            predicted_low_s=predicted_low_s,
            predicted_high_s=predicted_high_s,
            prediction_error=prediction_error,
            emulated=emulated,
            changes=tuple(changes),
            events=tuple(events),
        )

    @property
    def even(self) -> bool:
        """Whether several ranks share the batch evenly, to one sample."""
        return len(self.batches) > 1 and max(self.batches) - min(self.batches) <= 1


def summarise_epoch(records: Sequence[StepRecord], *, sync_every: int = 1) -> EpochSummary:
    """Returns what was measured over an epoch's steps. No step is left out, the first included.

    Where a rank took part in some of the steps only, its figures are over those; the tuples are
    in the order of the ranks that took part in any.

    Args:
        records: The epoch's steps, oldest first.
        sync_every: Steps between two synchronisations.

    Raises:
        ValueError: There are none, or they belong to several epochs.
    """
    epochs = {record.epoch for record in records}
    if len(epochs) != 1:
        raise ValueError(f"give the steps of one epoch, at least one: got epochs {sorted(epochs)}.")
    ranks = _by_rank(records)
    typical = median if sync_every == 1 else fmean
    compute = tuple(typical(step.compute_s for step in steps) for steps in ranks)
    critical = ranks[compute.index(max(compute))]
    # A rank's steps follow each other, also where it does not wait for the others in each.
    seconds = max(sum(step.step_s for step in steps) for steps in ranks)
    samples = sum(record.samples for record in records)
    return EpochSummary(
        epoch=epochs.pop(),
        first_step=records[0].step,
        last_step=records[-1].step,
        seconds=seconds,
        samples=samples,
        samples_per_s=samples / seconds,
        step_s=typical(record.step_s for record in records),
        data_s=tuple(typical(step.data_s for step in steps) for steps in ranks),
        compute_s=compute,
        wait_s=tuple(typical(step.wait_s for step in steps) for steps in ranks),
        transfer_s=tuple(typical(step.transfer_s for step in steps) for steps in ranks),
        codec_s=tuple(typical(step.codec_s for step in steps) for steps in ranks),
        optimizer_s=tuple(typical(step.optimizer_s for step in steps) for steps in ranks),
        other_s=tuple(typical(step.other_s for step in steps) for steps in ranks),
        overlapped_s=tuple(typical(step.overlapped_s for step in steps) for steps in ranks),
        ranks=tuple(steps[0].rank for steps in ranks),
        critical_rank=critical[0].rank,
        comm_share=typical(step.comm_share for step in critical),
        compute_spread=_spread(ranks, typical),
        wire_bytes=max(typical(step.wire_bytes for step in steps) for steps in ranks),
        memory_peak_bytes=tuple(_memory_peak(steps) for steps in ranks),
        loss=_mean_loss(records),
        skipped_steps=sum(record.skipped for record in records),
        loss_scale=records[-1].loss_scale,
        lr=records[-1].lr,
        guard_cosine=min(_found(record.guard_cosine for record in records), default=None),
        guard_error=max(_found(record.guard_error for record in records), default=None),
        noise=measure_noise(records, critical, typical),
    )


def _by_rank(records: Sequence[StepRecord]) -> list[list[RankStep]]:
    ranks: dict[int, list[RankStep]] = {}
    for step in chain.from_iterable(record.ranks for record in records):
        ranks.setdefault(step.rank, []).append(step)
    return [ranks[rank] for rank in sorted(ranks)]


def _spread(
    ranks: Sequence[Sequence[RankStep]], typical: Callable[[Iterable[float]], float]
) -> float:
    # Of medians, not the median of each step's spread: that one would read the noise of balanced
    # ranks as imbalance, since the largest minus the smallest is never below 0.
    times = [
        typical(step.compute_s for step in steps if step.batch > 0)
        for steps in ranks
        if any(step.batch > 0 for step in steps)
    ]
    longest = max(times, default=0.0)
    return (longest - min(times)) / longest if longest > 0 else 0.0


def _memory_peak(steps: Sequence[RankStep]) -> float | None:
    return max(_found(step.memory_peak_bytes for step in steps), default=None)


def _found(readings: Iterable[float | None]) -> list[float]:
    return [reading for reading in readings if reading is not None]


def _mean_loss(records: Sequence[StepRecord]) -> float | None:
    known = [(record.loss, record.samples) for record in records if record.loss is not None]
    weight = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / weight if weight else None
