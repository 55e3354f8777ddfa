r"""What a step would take under another plan, from what was measured under the present one.

The model of a step is DESIGN.md §6's: compute of the slowest rank, then what of the exchange is
exposed (`hetkit.planning.exposure`), then the rest, which no plan changes (data, optimizer, other).
It is used as a *difference*: each part is what was measured now plus what the model says the change
adds,

    part(new) = max(0, measured(now) + model(new) − model(now)),

so that whatever the model does not know, but the two plans share, cancels. Ranks whose compute
jitters wait for whoever is late; that share of the waiting is E[max_i t_i] − max_i E[t_i].

**The interval** is for the median step of an epoch to come. To first order, independent errors add
up as squares:

    σ² = 2·σ_step²                   the median step now, and that of the epoch to come
       + (ε_c·t_c)²                  a size of the slowest rank that has not run yet
       + (ε_l·Δtransfer)²            the link's fit, on what the change adds or takes
       + (ε_k·codec)²                the codec's trial
       + (ε_p·step)²                 how far this session's earlier predictions were off (rms)

and the interval is ± 1.96 σ. What no noise describes is added to one side whole: where only one
size was measured, time may be all fixed cost or all cost per sample; a precision that never ran
here has the catalogue's speed-up for a share of 0.3 to 0.9 in matrix products (Amdahl).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetkit.plan import Plan
from hetkit.planning.exchange_time import island_seconds, ring_bytes, slowest_link
from hetkit.planning.exposure import (
    Exposure,
    LinkFit,
    expected_max,
    expose,
    pack_buckets,
    ready_shares,
)
from hetkit.planning.precision_gain import Gain, precision_gains
from hetkit.planning.situation import AS_IT_IS, CodecCost, Parts, RankPace, Situation
from hetkit.planning.step_time import StepTime

LIKELY = 1.96
"""Standard errors on each side: 95 % of normal values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step is predicted to take.

    Args:
        plan: The plan that it is for.
        parts: Its parts on the rank that computes longest.
        low_s, high_s: The interval in which the median step is expected, 19 times in 20.
        notes: What the figures leave out, or are not measured for.
    """

    plan: Plan
    parts: Parts
    low_s: float
    high_s: float
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """The predicted step."""
        return self.parts.step_s

    @property
    def samples_per_s(self) -> float:
        """The predicted throughput."""
        return self.plan.global_batch / self.step_s


@dataclass(frozen=True, slots=True)
class _Side:
    """The model of a step under one plan: compute with its ends, late ranks, exchange."""

    critical: int
    compute_s: tuple[float, float, float]
    late_s: float
    exchange: Exposure


def predict(
    now: Situation,
    plan: Plan,
    *,
    costs: Mapping[str, CodecCost] = MappingProxyType({}),
    tensor_bytes: Sequence[float] = (),
) -> Prediction:
    """Returns what a step would take under ``plan``; the module's text derives how.

    Args:
        now: What was measured.
        plan: The plan to predict, for as many ranks.
        costs: What codecs cost, by their text. One that is not there counts as free and as not
            compressing, which the notes say.
        tensor_bytes: Sizes of the gradient's tensors in the order in which they are ready, for
            another ``bucket_bytes``.

    Example:
        >>> from dataclasses import replace
        >>> from hetkit.devices.fleet import emulate
        >>> plan = Plan(version=1, epoch=0, first_step=0, epoch_first_step=0, epoch_steps=9,
        ...             global_batch=40, batches=(20, 20), micro_batches=(40, 40),
        ...             amp=("off", "off"), compression="none")
        >>> paces = [StepTime(launch_s=0.0, sample_s=c) for c in (0.01, 0.03)]
        >>> ranks = tuple(RankPace(model=m, error=0, jitter=0, sizes=(20, 9)) for m in paces)
        >>> parts = Parts(data_s=0, compute_s=0.6, wait_s=0, transfer_s=0.4, codec_s=0,
        ...               optimizer_s=0.1, other_s=0)
        >>> link = LinkFit(hop_s=0.0, byte_s=1e-6, error=0.0, certain=True)
        >>> fleet = emulate("1xA100 + 1xV100").devices
        >>> now = Situation(plan=plan, devices=fleet, ranks=ranks, parts=parts, step_error_s=0.0,
        ...                 link=link, bucket_bytes=(4e5,))
        >>> new = predict(now, replace(plan, batches=(30, 10)))
        >>> round(new.step_s, 6), round(new.low_s, 6), round(new.high_s, 6)
        (0.8, 0.8, 0.8)
    """
    costs = {"none": AS_IT_IS, **costs}
    gains = precision_gains(now.devices, now.plan, plan)
    buckets = _buckets(now, plan, tensor_bytes)
    before = _transfers(now, now.plan, costs, now.bucket_bytes)
    after = _transfers(now, plan, costs, buckets)
    known = before is not None and after is not None
    same = (Gain(),) * len(now.ranks)
    old = _side(now, now.plan, now.bucket_bytes, before if known else None, costs, same)
    new = _side(now, plan, buckets, after if known else None, costs, gains)
    parts = _parts(now, plan, old, new)
    error_s = LIKELY * math.sqrt(_variance(now, plan, old, new, parts, costs))
    shorter, longer = _one_sided(now, old, new)
    return Prediction(
        plan=plan,
        parts=parts,
        low_s=max(0.0, parts.step_s - error_s - shorter),
        high_s=parts.step_s + error_s + longer,
        notes=tuple(_notes(now, plan, costs, gains, known, tensor_bytes)),
    )


def _transfers(
    now: Situation, plan: Plan, costs: Mapping[str, CodecCost], buckets: Sequence[float]
) -> list[float] | None:
    """Returns each bucket's seconds on the wire; None where the links are not known."""
    cost, n = costs.get(plan.compression, AS_IT_IS), plan.world_size
    if plan.hierarchy:
        leaders = len(plan.hierarchy)
        sends = [ring_bytes(leaders, size) * cost.ring_share for size in buckets]
        rows = zip(buckets, sends, strict=True)
        times = [island_seconds(now.devices, plan.hierarchy, *row) for row in rows]
        known = [each * _time_scale(now) for each in times if each is not None]
        return known if len(known) == len(times) else None
    link = now.link or _stated_link(now)
    if link is None:
        return None if buckets else []
    hops = cost.half_rounds * (n - 1)
    sends = [ring_bytes(n, size) * cost.ring_share for size in buckets]
    return [link.seconds(hops, sent) + cost.bucket_s for sent in sends]


def _stated_link(now: Situation) -> LinkFit | None:
    link = slowest_link(now.devices)
    if link is None:
        return None
    scale = _time_scale(now)
    hop_s, byte_s = link.latency_s * scale, scale / link.bytes_per_s
    return LinkFit(hop_s=hop_s, byte_s=byte_s, error=0.0, certain=True)


def _time_scale(now: Situation) -> float:
    emulation = now.devices[0].emulation
    return emulation.time_scale if emulation else 1.0


def _side(
    now: Situation,
    plan: Plan,
    buckets: Sequence[float],
    transfers: Sequence[float] | None,
    costs: Mapping[str, CodecCost],
    gains: Sequence[Gain],
) -> _Side:
    times = [
        _compute(pace, batch, micro, gain)
        for pace, batch, micro, gain in zip(
            now.ranks, plan.batches, plan.micro_batches, gains, strict=True
        )
    ]
    likely = [each[0] for each in times]
    critical = likely.index(max(likely))
    # Whoever turns out slow holds the step up, so each end is the slowest rank's.
    compute_s = (max(likely), max(t[1] for t in times), max(t[2] for t in times))
    jitters = [pace.jitter * t for pace, t in zip(now.ranks, likely, strict=True)]
    late_s = (expected_max(likely, jitters) - likely[critical]) / math.sqrt(plan.sync_every)
    if not transfers:
        return _Side(critical, compute_s, late_s, Exposure.none())
    element_s = costs.get(plan.compression, AS_IT_IS).element_s
    codecs = [size / now.element_bytes * element_s for size in buckets]
    if plan.local:
        h = plan.sync_every
        exchange = Exposure(wait_s=0.0, codec_s=sum(codecs) / h, transfer_s=sum(transfers) / h)
    else:
        shares = ready_shares(buckets, now.seen_shares)
        rows = zip(likely, plan.batches, plan.micro_batches, strict=True)
        exchange = expose([_ready(*row, shares) for row in rows], codecs, transfers)
    return _Side(critical, compute_s, late_s, exchange)


def _compute(pace: RankPace, batch: int, micro: int, gain: Gain) -> tuple[float, float, float]:
    """Returns the likely, the least and the most seconds of a rank's compute."""
    whole = pace.model.seconds(batch, micro)
    passes = -(-batch // micro)
    fixed = passes * pace.model.launch_s if isinstance(pace.model, StepTime) else 0.0
    likely, least, most = (
        fixed + (whole - fixed) / factor for factor in (gain.likely, gain.most, gain.least)
    )
    if batch and len(pace.sizes) == 1:
        # All fixed cost, or all cost per sample: the model holds the latter.
        other = likely * passes / (batch / pace.sizes[0])
        least, most = min(least, other), max(most, other)
    return likely, least, most


def _ready(whole_s: float, batch: int, micro: int, shares: Sequence[float]) -> list[float]:
    """Returns when a rank has its buckets ready: in the last of its even passes."""
    passes = max(1, -(-batch // micro))
    before_s = whole_s * (passes - 1) / passes
    return [before_s + share * whole_s / passes for share in shares]


def _buckets(now: Situation, plan: Plan, tensor_bytes: Sequence[float]) -> Sequence[float]:
    if plan.bucket_bytes == now.plan.bucket_bytes or not tensor_bytes or not now.bucket_bytes:
        return now.bucket_bytes
    return pack_buckets(tensor_bytes, plan.bucket_bytes)


def _parts(now: Situation, plan: Plan, old: _Side, new: _Side) -> Parts:
    measured = now.parts
    batch = now.plan.batches[old.critical]
    ratio = plan.batches[new.critical] / batch if batch else 1.0
    before, after = old.exchange, new.exchange
    late_s = (new.late_s + after.wait_s) - (old.late_s + before.wait_s)
    return Parts(
        data_s=measured.data_s * ratio,
        compute_s=_changed(measured.compute_s, new.compute_s[0] - old.compute_s[0]),
        wait_s=_changed(measured.wait_s, late_s),
        transfer_s=_changed(measured.transfer_s, after.transfer_s - before.transfer_s),
        codec_s=_changed(measured.codec_s, after.codec_s - before.codec_s),
        optimizer_s=measured.optimizer_s,
        other_s=measured.other_s,
    )


def _changed(measured_s: float, change_s: float) -> float:
    return max(0.0, measured_s + change_s)


def _variance(
    now: Situation,
    plan: Plan,
    old: _Side,
    new: _Side,
    parts: Parts,
    costs: Mapping[str, CodecCost],
) -> float:
    pace = now.ranks[new.critical]
    same_size = plan.batches[new.critical] == now.plan.batches[old.critical]
    link_error = now.link.error if now.link else 0.0
    cost = costs.get(plan.compression, AS_IT_IS)
    terms = (
        math.sqrt(2) * now.step_error_s,
        0.0 if same_size and old.critical == new.critical else pace.error * new.compute_s[0],
        link_error * (new.exchange.transfer_s - old.exchange.transfer_s),
        cost.element_error * new.exchange.codec_s,
        (now.trust or 0.0) * parts.step_s,
    )
    return sum(term * term for term in terms)


def _one_sided(now: Situation, old: _Side, new: _Side) -> tuple[float, float]:
    """Returns by how much what no noise describes may make the step shorter, or longer."""
    likely, least, most = new.compute_s
    shorter, longer = likely - least, most - likely
    if now.link is not None and not now.link.certain:
        # One size was measured: it may be all latency, and then fewer bytes gain nothing.
        change = new.exchange.transfer_s - old.exchange.transfer_s
        shorter, longer = shorter + max(0.0, change), longer + max(0.0, -change)
    return shorter, longer


def _notes(
    now: Situation,
    plan: Plan,
    costs: Mapping[str, CodecCost],
    gains: Sequence[Gain],
    known: bool,
    tensor_bytes: Sequence[float],
) -> list[str]:
    notes = [f"precision: by {basis}" for basis in dict.fromkeys(g.basis for g in gains) if basis]
    if plan.compression not in costs and plan.world_size > 1:
        notes.append(f"what {plan.compression} costs and sends is not known: taken as none")
    if plan.bucket_bytes != now.plan.bucket_bytes and not tensor_bytes:
        notes.append("the gradient's tensors are not known: buckets are taken as they are")
    if not known:
        notes.append("the links are not known: the exchange is taken to be what it is now")
    if plan.local:
        notes.append("local steps are other maths; the averaging's own arithmetic is left out")
    if any(len(pace.sizes) == 1 for pace in now.ranks) and plan.batches != now.plan.batches:
        notes.append("one batch size was measured: the fixed cost of a pass is not known yet")
    if now.link is not None and not now.link.certain:
        notes.append("one size of transfer was measured: its latency is not known")
    return notes
