"""The forecast: what was predicted of a plan's step, beside what then came.

Takes the steps of the plan in force as evidence, predicts the next plan's step from them before it
begins, and says at the epoch's end how far that was off. Those errors widen later intervals: trust
is earned.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hetkit.devices.device import Device
from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.exposure import LinkFit, Transfer, fit_link
from hetkit.planning.pace import LEAST_TIMES, Pace
from hetkit.planning.situation import AS_IT_IS, CodecCost, Parts, RankPace, Situation
from hetkit.planning.what_if import Prediction, predict
from hetkit.records.steps import StepRecord
from hetkit.records.trial import Trial

DROPPED_STEPS = 2
LEAST_STEPS = 3
"""Steps of a plan, after its first two, that say something about it."""

_STEPS_KEPT = 40
_ERRORS_KEPT = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One prediction beside what came.

    Args:
        predicted: What was predicted before the plan began; None where nothing was known.
        measured_s: The median step under that plan; None where it had too few steps.

    Example:
        >>> Kept(predicted=None, measured_s=0.2).error is None
        True
    """

    predicted: Prediction | None
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """Predicted / measured − 1; None where one of them is missing."""
        if self.predicted is None or self.measured_s is None:
            return None
        return self.predicted.step_s / self.measured_s - 1


class Forecast:
    """Predicts steps and keeps the predictions beside what came. Not thread-safe.

    Example:
        >>> forecast = Forecast()
        >>> forecast.close_epoch()
        Kept(predicted=None, measured_s=None)
    """

    def __init__(self) -> None:
        self.predicted: Prediction | None = None
        self.costs: dict[str, CodecCost] = {"none": AS_IT_IS}
        self.tensor_bytes: tuple[float, ...] = ()
        self._element_bytes = 4
        self._plan: Plan | None = None
        self._first = 0
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._transfers: deque[Transfer] = deque(maxlen=4 * _STEPS_KEPT)
        self._tried: tuple[Transfer, ...] = ()
        self._buckets: tuple[float, ...] = ()
        self._shares: dict[float, deque[float]] = {}
        self._base: Situation | None = None
        self._errors: deque[float] = deque(maxlen=_ERRORS_KEPT)

    def begin(self, plan: Plan, before: Situation | None) -> None:
        """A plan is about to begin: predicts its step from the ``before`` it, if there is one."""
        self._base = before or self._base
        known = plan.compression in self.costs or plan.world_size == 1
        self.predicted = None
        if self._base is not None and known:
            self.predicted = predict(
                self._base, plan, costs=self.costs, tensor_bytes=self.tensor_bytes
            )
        if self._plan is not None and self._plan.bucket_bytes != plan.bucket_bytes:
            self._shares = {}
        self._plan = plan
        self._steps.clear()
        self._first = plan.first_step + DROPPED_STEPS

    def reset(self) -> None:
        """Other devices compute from now on: nothing of what was measured holds."""
        self._base, self._plan, self._tried = None, None, ()
        self.tensor_bytes = ()
        self.costs = {"none": AS_IT_IS}
        self._steps.clear()
        self._transfers.clear()
        self._shares = {}
        self._errors.clear()
        self.predicted = None

    def learn(self, trial: Trial) -> None:
        """Takes in what a trial found."""
        self.tensor_bytes = trial.tensor_bytes
        self._element_bytes = trial.element_bytes
        self._tried = trial.transfers or self._tried
        link = self.link()
        world_size = self._plan.world_size if self._plan else 1
        self.costs |= trial.costs if link is None else trial.costs_over(link, world_size)

    def add(self, record: StepRecord, rows: Sequence[StepRow]) -> None:
        """Takes a step of the plan in force."""
        plan = self._plan
        if plan is None or record.step < self._first or record.samples != plan.global_batch:
            return
        self._steps.append(record)
        if plan.local or not rows[0].bucket_bytes:
            return
        self._buckets = tuple(float(size) for size in rows[0].bucket_bytes)
        cost = self.costs.get(plan.compression)
        if cost is not None and not plan.hierarchy:
            self._take_transfers(rows, cost)
        if plan.compression == "none":
            self._take_shares(rows)

    def _take_transfers(self, rows: Sequence[StepRow], cost: CodecCost) -> None:
        n, count = len(rows), len(self._buckets)
        each, odd = divmod(len(rows[0].stamps.collectives), count)
        if odd or each < 1 or any(row.guard_cosine is not None for row in rows):
            return  # other collectives are among them: which is whose cannot be told
        spans, free = [], 0.0
        for same in zip(*(row.stamps.collectives for row in rows), strict=True):
            arrival, end = max(start for start, _ in same), max(end for _, end in same)
            spans.append(end - max(arrival, free))
            free = end
        for place, size in enumerate(self._buckets):
            self._transfers.append(
                Transfer(
                    hops=cost.half_rounds * (n - 1),
                    sent_bytes=ring_bytes(n, size) * cost.ring_share,
                    seconds=sum(spans[place * each : (place + 1) * each]),
                )
            )

    def _take_shares(self, rows: Sequence[StepRow]) -> None:
        """Notes when buckets were ready that did not have to wait for the one before them."""
        for row in rows:
            stamps, free = row.stamps, 0.0
            whole_s = stamps.cut - stamps.start - stamps.data_s - stamps.inside_s
            if not row.batch or len(stamps.collectives) != len(self._buckets) or whole_s <= 0:
                continue
            done = 0.0
            for (start, end), size in zip(stamps.collectives, self._buckets[:-1], strict=False):
                done += size / sum(self._buckets)
                share = 1 - (stamps.cut - start) * max(1, row.micro_steps) / whole_s
                if start > free and 0 < share < 1:
                    self._shares.setdefault(done, deque(maxlen=_STEPS_KEPT)).append(share)
                free = end

    @property
    def steps(self) -> int:
        """Steps of the plan in force that count."""
        return len(self._steps)

    def situation(self, devices: Sequence[Device], paces: Sequence[Pace]) -> Situation | None:
        """Returns what is known under the plan in force; None while that is too little."""
        plan = self._plan
        known = [_rank_pace(pace) for pace in paces]
        ranks = tuple(rank for rank in known if rank is not None)
        if plan is None or self.steps < LEAST_STEPS or len(ranks) != plan.world_size:
            return None
        parts, error_s = _parts(list(self._steps), local=plan.local)
        return Situation(
            plan=plan,
            devices=tuple(devices),
            ranks=ranks,
            parts=parts,
            step_error_s=error_s,
            link=self.link(),
            bucket_bytes=self._buckets if plan.world_size > 1 else (),
            seen_shares=self._seen_shares(),
            element_bytes=self._element_bytes,
            trust=_rms(self._errors) if self._errors else None,
        )

    def link(self) -> LinkFit | None:
        """Returns the link as measured; None where nothing has travelled yet.

        A trial's sums travel while nothing else does, so steps of two sizes count for more.
        """
        trained = fit_link(self._transfers)
        if trained is not None and trained.certain:
            return trained
        return fit_link([*self._tried, *self._transfers])

    def close_epoch(self) -> Kept:
        """Returns the prediction for the plan in force beside what came."""
        measured = None
        if self.steps >= LEAST_STEPS:
            times = [record.step_s for record in self._steps]
            local = self._plan is not None and self._plan.local
            measured = fmean(times) if local else median(times)
        kept = Kept(predicted=self.predicted, measured_s=measured)
        if kept.error is not None:
            self._errors.append(kept.error)
        return kept

    def _seen_shares(self) -> tuple[tuple[float, float], ...]:
        points: list[tuple[float, float]] = []
        for at, shares in sorted(self._shares.items()):
            share = median(shares)
            if len(shares) >= LEAST_STEPS and (not points or share > points[-1][1]):
                points.append((at, share))
        return tuple(points)


def _rank_pace(pace: Pace) -> RankPace | None:
    model = pace.model()
    if model is None:
        return None
    count = len(pace.sizes[-1].times)
    error = pace.error(count)
    trusted = [size for size in pace.sizes if len(size.times) >= LEAST_TIMES] or pace.sizes
    return RankPace(
        model=model,
        error=error,
        jitter=error * math.sqrt(2 * count / math.pi),
        sizes=tuple(dict.fromkeys(size.pass_samples for size in trusted)),
    )


def _parts(records: Sequence[StepRecord], *, local: bool) -> tuple[Parts, float]:
    """Returns where a step goes on the rank that computes longest, and the step's error.

    Medians of parts do not add up to the median step, so the parts are means over the middle half
    of the steps by their length, which do, and leave outliers out as well. With local steps no
    single step is typical, and all count.
    """
    steps = sorted(record.step_s for record in records)
    places = range(len(records[0].ranks))
    compute = [median(record.ranks[place].compute_s for record in records) for place in places]
    slowest = compute.index(max(compute))
    quarter = 0 if local else (len(records) - 1) // 4
    middle = sorted(records, key=lambda record: record.step_s)[quarter : len(records) - quarter]
    names = ("data_s", "compute_s", "wait_s", "transfer_s", "codec_s", "optimizer_s")
    means = {name: fmean(getattr(each.ranks[slowest], name) for each in middle) for name in names}
    step_s = fmean(record.step_s for record in middle)
    scatter = 1.4826 * median(abs(each - median(steps)) for each in steps)
    error_s = scatter * math.sqrt(math.pi / (2 * len(steps)))
    return Parts(**means, other_s=step_s - math.fsum(means.values())), error_s


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))
