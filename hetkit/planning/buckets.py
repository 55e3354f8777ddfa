"""How large DDP's gradient buckets should be, from what was measured of link and computing.

Small buckets begin to travel early, while the backward still runs, but each pays the latency of a
collective; large ones pay it seldom, and the last of them cannot start before all is computed::

    small    backward ███1██2██3██4│                one latency λ each: the queue falls behind
             link        λ1═λ2═λ3══λ4═│
    large    backward ████████████1│                nothing beside the backward
             link                  λ1════════│
    right    backward █████1██████2│
             link          λ1═══   λ2══│

With nothing but latency λ and the time R that all bytes take, buckets that all arrive late cost
K·λ + R/K, least at K = √(R/λ). Layers are unequal, ranks differ and links are slower than that, so
each size is played through instead: DDP's own packing of the tensors, the measured times at which
gradients are ready, and one queue of exchanges (`hetkit.planning.exposure`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetkit.errors import PlanError
from hetkit.planning.exchange_time import BUCKET_BYTES, ring_bytes
from hetkit.planning.exposure import LinkFit, expose, pack_buckets, ready_shares
from hetkit.planning.situation import AS_IT_IS, CodecCost

SMALLEST_BYTES = 64 * 2**10
LEAST_GAIN = 0.02
"""Share of the step that another size must save to be worth it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketChoice:
    """One bucket size, played through.

    Args:
        bucket_bytes: What ``Settings.bucket_bytes`` would be; None is PyTorch's own.
        buckets: How many buckets there are then.
        exposed_s: What the exchange adds to the compute of the slowest rank.

    Example:
        >>> BucketChoice(bucket_bytes=None, buckets=3, exposed_s=0.01).buckets
        3
    """

    bucket_bytes: int | None
    buckets: int
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketProposal:
    """The proposed bucket size, beside the present one; predicted, not measured.

    Args:
        present: The size in force.
        best: The proposed one; the present one where no other gains enough.
        gain: Share of the step (compute and exchange) that it is predicted to save.
        choices: All sizes that were played through, smallest first, PyTorch's own last.

    Example:
        >>> now = BucketChoice(bucket_bytes=None, buckets=1, exposed_s=0.2)
        >>> BucketProposal(present=now, best=now, gain=0.0, choices=(now,)).changes
        False
    """

    present: BucketChoice
    best: BucketChoice
    gain: float
    choices: tuple[BucketChoice, ...]

    @property
    def changes(self) -> bool:
        """Whether another size than the present one is proposed."""
        return self.best != self.present


def propose_buckets(
    tensor_bytes: Sequence[float],
    compute_s: Sequence[float],
    link: LinkFit,
    *,
    present_bytes: int | None = None,
    seen_shares: Sequence[tuple[float, float]] = (),
    cost: CodecCost = AS_IT_IS,
    element_bytes: int = 4,
) -> BucketProposal:
    """Proposes a size for the gradient's buckets.

    Args:
        tensor_bytes: Size of each parameter's gradient, in the order of the backward; of measured
            buckets, where no more is known (then buckets can be joined, not cut).
        compute_s: Compute time of each rank's step, at least one.
        link: The link, as fitted to measured exchanges.
        present_bytes: The size in force. Default None: PyTorch's own.
        seen_shares: Measured (share of bytes, share of compute) at which buckets were ready.
        cost: What the codec in force costs. Default: none.
        element_bytes: Size of an element of the gradient. Default 4.

    Raises:
        PlanError: There are no tensors or no ranks, or a size is not above 0.

    Example:
        >>> link = LinkFit(hop_s=1e-4, byte_s=1e-9, error=0.01, certain=True)
        >>> proposal = propose_buckets([4e6] * 16, [0.1, 0.1], link, present_bytes=2**30)
        >>> proposal.present.buckets, proposal.best.buckets, proposal.best.bucket_bytes
        (1, 16, 2097152)
    """
    if not compute_s or not tensor_bytes or min(tensor_bytes) <= 0:
        raise PlanError(
            f"a bucket size needs ranks and tensors above 0 bytes: {len(compute_s)} ranks, "
            f"tensors {list(tensor_bytes)}."
        )

    def play(limit: int | None) -> BucketChoice:
        sizes = pack_buckets(tensor_bytes, limit)
        exposed_s = _exposed_s(sizes, compute_s, link, seen_shares, cost, element_bytes)
        return BucketChoice(bucket_bytes=limit, buckets=len(sizes), exposed_s=exposed_s)

    choices = tuple(play(limit) for limit in (*_sizes(sum(tensor_bytes)), None))
    present = play(present_bytes)
    # Of sizes that are equally good, the largest: the fewest collectives.
    best = min(
        choices, key=lambda choice: (choice.exposed_s, -(choice.bucket_bytes or BUCKET_BYTES))
    )
    gain = (present.exposed_s - best.exposed_s) / (max(compute_s) + present.exposed_s)
    if gain <= max(LEAST_GAIN, link.error):
        best, gain = present, 0.0
    return BucketProposal(present=present, best=best, gain=gain, choices=choices)


def _sizes(whole_bytes: float) -> list[int]:
    """Returns powers of two from `SMALLEST_BYTES` up to the first that holds all."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < whole_bytes:
        sizes.append(2 * sizes[-1])
    return sizes


def _exposed_s(
    sizes: Sequence[float],
    compute_s: Sequence[float],
    link: LinkFit,
    seen: Sequence[tuple[float, float]],
    cost: CodecCost,
    element_bytes: int,
) -> float:
    n = len(compute_s)
    if n == 1:
        return 0.0
    shares = ready_shares(sizes, seen)
    ready_s = [[share * seconds for share in shares] for seconds in compute_s]
    hops = cost.half_rounds * (n - 1)
    transfer_s = [link.seconds(hops, ring_bytes(n, size) * cost.ring_share) for size in sizes]
    codec_s = [size / element_bytes * cost.element_s for size in sizes]
    return expose(ready_s, codec_s, transfer_s).seconds
