r"""What of the exchange holds a step up: links fitted from measured transfers, buckets in a queue.

Buckets are exchanged one after the other, each as soon as the last rank has it ready and encoded.
What lies after the slowest rank's last hand-over is exposed; the rest ran beside its backward::

    slowest rank   ███████1██████2██████3│                         ready with bucket 1, 2, 3
    engine                 c══1══▶c══2══▶c══3══▶                    c codec, ══▶ transfer
                                         └──────┘ exposed

A transfer lasts hops·*h* + bytes·*r*: a ring all-reduce over n ranks has 2(n − 1) hops, an
all-to-all or an all-gather n − 1 (`hetkit.planning.exchange_time`). Both are fitted to measured
transfers as a device's step time is, robustly, h ≥ 0 and r > 0, so the latency contains what the
software costs a collective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from hetkit.errors import PlanError
from hetkit.planning.exchange_time import BUCKET_BYTES
from hetkit.planning.step_time import Observation, fit_medians, medians, tells_apart

FIRST_BUCKET_BYTES = 2**20
"""PyTorch's own first bucket, where no size is given."""

FORWARD_SHARE = 1 / 3
"""Of a pass's compute, before the backward begins: each product of the forward has two there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One measured exchange of a bucket.

    Args:
        hops: Rounds in which a rank sends on: 2(n − 1) for an all-reduce.
        sent_bytes: What a rank sent in all of them.
        seconds: From the last rank's arrival to the end.

    Example:
        >>> Transfer(hops=2, sent_bytes=1e6, seconds=0.01).hops
        2
    """

    hops: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """A link as measured: hops·``hop_s`` + bytes·``byte_s``.

    Args:
        hop_s: Seconds per hop, whatever the size.
        byte_s: Seconds per byte sent.
        error: Relative standard error of a transfer that the fit predicts.
        certain: Whether latency and rate could be told apart: two sizes were measured.

    Example:
        >>> link = LinkFit(hop_s=0.001, byte_s=1e-9, error=0.01, certain=True)
        >>> round(link.seconds(2, 1e6), 6)
        0.003
    """

    hop_s: float
    byte_s: float
    error: float
    certain: bool

    def seconds(self, hops: int, sent_bytes: float) -> float:
        """Returns how long an exchange takes."""
        return hops * self.hop_s + sent_bytes * self.byte_s


def fit_link(transfers: Sequence[Transfer]) -> LinkFit | None:
    """Fits a link to measured transfers; None where there is none of a byte or more.

    The error is that of the median of each size: 1.4826·MAD·√(π/2n), or what the fit leaves of the
    medians where that is more.

    Example:
        >>> fit = fit_link([Transfer(hops=2, sent_bytes=b, seconds=2e-3 + b * 1e-9)
        ...                 for b in (1e6, 1e6, 4e6, 4e6)])
        >>> round(fit.hop_s, 6), round(1e-9 / fit.byte_s, 6)
        (0.001, 1.0)
    """
    seen = [
        Observation(batch=round(t.sent_bytes), micro_steps=t.hops, compute_s=t.seconds)
        for t in transfers
        if round(t.sent_bytes) >= t.hops > 0 and t.seconds > 0
    ]
    if not seen:
        return None
    sizes = medians(seen)
    model = fit_medians(sizes)
    off = [model.seconds_in(s.batch, s.micro_steps) / s.seconds - 1 for s in sizes]
    middle = {(s.batch, s.micro_steps): s.seconds for s in sizes}
    noise = [abs(o.compute_s / middle[o.batch, o.micro_steps] - 1) for o in seen]
    standard = 1.4826 * median(noise) * math.sqrt(math.pi / (2 * len(noise)))
    return LinkFit(
        hop_s=model.launch_s,
        byte_s=model.sample_s,
        error=max(standard, math.sqrt(sum(each * each for each in off) / len(off))),
        certain=tells_apart(sizes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """What of an exchange holds up the rank that computes longest, in seconds.

    Args:
        wait_s: Until the other ranks' buckets were there.
        codec_s: Encoding and decoding.
        transfer_s: On the wire.

    Example:
        >>> Exposure(wait_s=0.0, codec_s=0.5, transfer_s=1.0).seconds
        1.5
    """

    wait_s: float
    codec_s: float
    transfer_s: float

    @classmethod
    def none(cls) -> "Exposure":
        """Returns that of no exchange at all."""
        return cls(wait_s=0.0, codec_s=0.0, transfer_s=0.0)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.wait_s + self.codec_s + self.transfer_s


def expose(
    ready_s: Sequence[Sequence[float]], codec_s: Sequence[float], transfer_s: Sequence[float]
) -> Exposure:
    """Returns what of the buckets' exchanges comes after the slowest rank's last hand-over.

    Args:
        ready_s: Per rank, when it has each bucket ready, rising.
        codec_s: Seconds of encoding and decoding of each bucket.
        transfer_s: Seconds on the wire of each bucket.

    Raises:
        PlanError: The lists differ in length.

    Example:
        >>> expose([[1.0, 3.0], [2.0, 4.0]], [0.0, 0.0], [1.0, 2.0])
        Exposure(wait_s=0.0, codec_s=0.0, transfer_s=2.0)
        >>> expose([[1.0, 3.0], [2.0, 4.0]], [0.0, 0.0], [5.0, 2.0])
        Exposure(wait_s=0.0, codec_s=0.0, transfer_s=5.0)
    """
    if {len(rank) for rank in ready_s} | {len(transfer_s)} != {len(codec_s)}:
        raise PlanError("give every rank one time per bucket, and each bucket one exchange.")
    slowest = max(ready_s, key=lambda rank: rank[-1], default=())
    cut = slowest[-1] if slowest else 0.0
    wait = codec = transfer = free = 0.0
    for bucket, (coding_s, sending_s) in enumerate(zip(codec_s, transfer_s, strict=True)):
        began = max(slowest[bucket], free)
        arrived = max(max(rank[bucket], free) for rank in ready_s) + coding_s
        codec += _after(cut, began, began + coding_s)
        wait += _after(cut, began + coding_s, arrived)
        free = arrived + sending_s
        transfer += _after(cut, arrived, free)
    return Exposure(wait_s=wait, codec_s=codec, transfer_s=transfer)


def _after(cut: float, start: float, end: float) -> float:
    return max(0.0, end - max(start, cut))


def ready_shares(bucket_bytes: Sequence[float], seen: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the share of a pass's compute after which each bucket is ready.

    Between the measured points the share rises in proportion to the bytes; before the first of
    them from `FORWARD_SHARE`; the last bucket is ready when all is computed.

    Args:
        bucket_bytes: Size of each bucket, in the order of the exchange.
        seen: Measured points (share of the bytes, share of the compute), rising, all below 1.

    Example:
        >>> ready_shares([1.0, 1.0], []), ready_shares([2.0, 1.0, 1.0], [(0.5, 0.8)])
        ([0.6666666666666667, 1.0], [0.8, 0.9, 1.0])
    """
    points = [(0.0, min([FORWARD_SHARE, *(share for _, share in seen)])), *seen, (1.0, 1.0)]
    whole, done, shares = sum(bucket_bytes), 0.0, []
    for size in bucket_bytes[:-1]:
        done += size
        at = min(1.0, done / whole)
        after = next(place for place in range(1, len(points)) if points[place][0] >= at)
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        shares.append(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
    return [*shares, 1.0] if bucket_bytes else []


def pack_buckets(tensor_bytes: Sequence[float], limit_bytes: float | None) -> list[float]:
    """Returns the sizes of the buckets that DDP makes of tensors, in the order of their gradients.

    A bucket is closed when it has reached the limit. Without one, PyTorch's hold: 1 MiB for the
    first bucket, so that the exchange begins early, and 25 MiB for the others.

    Example:
        >>> pack_buckets([3.0, 3.0, 3.0, 3.0], limit_bytes=5.0)
        [6.0, 6.0]
        >>> pack_buckets([2.0**20, 2.0**20], limit_bytes=None)
        [1048576.0, 1048576.0]
    """
    sizes: list[float] = []
    filled, limit = 0.0, FIRST_BUCKET_BYTES if limit_bytes is None else limit_bytes
    for size in tensor_bytes:
        filled += size
        if filled >= limit:
            sizes.append(filled)
            filled, limit = 0.0, BUCKET_BYTES if limit_bytes is None else limit_bytes
    return [*sizes, filled] if filled else sizes


def expected_max(middles: Sequence[float], sigmas: Sequence[float]) -> float:
    """Returns the mean of the largest of independent normal values.

    Ranks whose compute time jitters wait for whoever is late: E[max] = hi − ∫ Π Φ((x − m)/σ) dx,
    over the range in which a value is likely at all.

    Example:
        >>> round(expected_max([0.0, 0.0], [1.0, 1.0]), 3)      # 1/√π
        0.564
    """
    sure = [m for m, s in zip(middles, sigmas, strict=True) if s <= 0]
    noisy = [NormalDist(m, s) for m, s in zip(middles, sigmas, strict=True) if s > 0]
    if not noisy:
        return max(sure, default=0.0)
    low = max([*(d.mean - 6 * d.stdev for d in noisy), *sure])
    high = max([max(d.mean + 6 * d.stdev for d in noisy), *sure])
    points = 240
    width = (high - low) / points
    below = (math.prod(d.cdf(low + (i + 0.5) * width) for d in noisy) for i in range(points))
    return high - width * sum(below)
