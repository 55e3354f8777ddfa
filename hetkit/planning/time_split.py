"""Where a step's time went, per rank: the exact split, from stamps of all ranks.

Each rank stamps the start and the end of every collective on a clock that the ranks share. A
collective cannot finish before its last participant has come, so with ``a = max_j start_j``::

    rank 0   compute ████████|start···wait···a══transfer══end|optimizer
    rank 1   compute ███████████████████████|a══transfer══end|optimizer
                                             ↑ the last one arrives

    wait_i     = a − start_i         transfer_i = end_i − a

What lies before the rank's last hand-over of a bucket (its *cut*) ran beside the backward pass:
it is reported as overlapped and not added. What lies after the cut held the step up. Then

    step = data + compute + wait + transfer + codec + optimizer + other

and *other* is the honesty check. Source of the formula: DESIGN.md §6; it is the split used by
critical-path analyses of synchronous training.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamps:
    """One rank's clock readings in one step, in seconds on a clock that all ranks share.

    Args:
        start: When the step began.
        end: When it ended.
        cut: When the rank handed over its last bucket, that is, had computed all it had to.
        data_s: Seconds spent on fetching and moving samples, before or between forwards.
        optimizer_s: Seconds of clipping and the optimizer's step.
        codec_s: Seconds that encoding and decoding took after the cut.
        collectives: ``(start, end)`` of each exchange, in order; the same number on every rank.
        compute_s: Seconds of compute, where exchanges interrupt it (an own loop with several
            optimizers); None: all up to the cut but the data's and what the model waited.
        inside_s: Seconds before the cut that the model itself waited for the other ranks (its
            BatchNorm layers look across them).

    Example:
        >>> fast = Stamps(start=0, end=9, cut=4, data_s=1, optimizer_s=1, collectives=((4, 8),))
        >>> slow = Stamps(start=0, end=9, cut=7, data_s=1, optimizer_s=1, collectives=((7, 8),))
        >>> [(split.compute_s, split.wait_s) for split in split_step([fast, slow])]
        [(3.0, 3.0), (6.0, 0.0)]
    """

    start: float
    end: float
    cut: float
    data_s: float
    optimizer_s: float
    codec_s: float = 0.0
    collectives: tuple[tuple[float, float], ...] = ()
    compute_s: float | None = None
    inside_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Where one rank's step went, in seconds; all but ``overlapped_s`` add up to ``step_s``.

    Example:
        >>> (split,) = split_step([Stamps(start=0, end=5, cut=4, data_s=1, optimizer_s=1)])
        >>> split.compute_s, split.other_s, split.comm_share
        (3.0, 0.0, 0.0)
    """

    step_s: float
    data_s: float
    compute_s: float
    wait_s: float
    transfer_s: float
    codec_s: float
    optimizer_s: float
    other_s: float
    overlapped_s: float

    @property
    def comm_share(self) -> float:
        """(wait + exposed transfer + codec) / step."""
        return (self.wait_s + self.transfer_s + self.codec_s) / self.step_s if self.step_s else 0.0


def split_step(ranks: Sequence[Stamps]) -> tuple[TimeSplit, ...]:
    """Splits one step of all ranks.

    Args:
        ranks: The stamps of every rank for the same step, in rank order.

    Returns:
        One split per rank.

    Raises:
        ValueError: The ranks took part in different numbers of collectives.
    """
    counts = {len(stamps.collectives) for stamps in ranks}
    if len(counts) > 1:
        raise ValueError(f"ranks took part in different numbers of collectives: {sorted(counts)}")
    by_collective = zip(*(s.collectives for s in ranks), strict=True)
    last_arrivals = [max(start for start, _ in same) for same in by_collective]
    return tuple(_split_rank(stamps, last_arrivals) for stamps in ranks)


def _split_rank(stamps: Stamps, last_arrivals: Sequence[float]) -> TimeSplit:
    wait, transfer, overlapped = stamps.inside_s, 0.0, 0.0
    for (start, end), arrival in zip(stamps.collectives, last_arrivals, strict=True):
        arrival = min(arrival, end)
        wait += _after(stamps.cut, start, arrival)
        transfer += _after(stamps.cut, arrival, end)
        overlapped += max(0.0, min(end, stamps.cut) - start)
    step = stamps.end - stamps.start
    compute = stamps.compute_s
    if compute is None:
        compute = max(0.0, stamps.cut - stamps.start - stamps.data_s - stamps.inside_s)
    known = stamps.data_s + compute + wait + transfer + stamps.codec_s + stamps.optimizer_s
    return TimeSplit(
        step_s=step,
        data_s=stamps.data_s,
        compute_s=compute,
        wait_s=wait,
        transfer_s=transfer,
        codec_s=stamps.codec_s,
        optimizer_s=stamps.optimizer_s,
        other_s=step - known,
        overlapped_s=overlapped,
    )


def _after(cut: float, start: float, end: float) -> float:
    return max(0.0, end - max(start, cut))
