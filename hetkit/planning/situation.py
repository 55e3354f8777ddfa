"""What was measured of a step under one plan: what predictions begin with."""

import math
from dataclasses import dataclass, fields

from hetkit.devices.device import Device
from hetkit.plan import Plan
from hetkit.planning.exposure import LinkFit
from hetkit.planning.step_time import ComputeTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Where a step goes, on the rank that computes longest, in seconds.

    Example:
        >>> Parts(data_s=0, compute_s=3, wait_s=0, transfer_s=1, codec_s=0, optimizer_s=1,
        ...       other_s=0).step_s
        5.0
    """

    data_s: float
    compute_s: float
    wait_s: float
    transfer_s: float
    codec_s: float
    optimizer_s: float
    other_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return math.fsum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPace:
    """What is known of one rank's compute.

    Args:
        model: Its fitted time.
        error: Relative standard error of that time at the present size.
        jitter: Relative standard deviation of one step's compute.
        sizes: Samples per pass that were measured.
    """

    model: ComputeTime
    error: float
    jitter: float
    sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecCost:
    """What a codec costs, as tried on this task's gradients.

    Args:
        element_s: Seconds of encoding and decoding per element.
        element_error: Relative standard error of that.
        ring_share: Bytes it sends, as a share of what the gradient as it is would.
        bucket_s: Seconds that its collectives take for a bucket beyond hops and bytes: software,
            which is paid per collective. Default 0.
        half_rounds: Its collectives per bucket, an all-reduce counted as two: n − 1 hops each.
    """

    element_s: float
    element_error: float
    ring_share: float
    half_rounds: int
    bucket_s: float = 0.0


AS_IT_IS = CodecCost(element_s=0.0, element_error=0.0, ring_share=1.0, half_rounds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What was measured under the present plan.

    Args:
        plan: The plan.
        devices: What runs the ranks, in rank order.
        ranks: What is known of each rank's compute.
        parts: Of the rank that computes longest; they add up to the step.
        step_error_s: Standard error of that step.
        link: The link as measured; None where nothing travels.
        bucket_bytes: Size of each bucket of the gradient, in the order of the exchange.
        seen_shares: Measured (share of bytes, share of compute) at which buckets were ready.
        element_bytes: Size of one element of the gradient.
        trust: Relative root mean square error of this session's earlier predictions, if any.
    """

    plan: Plan
    devices: tuple[Device, ...]
    ranks: tuple[RankPace, ...]
    parts: Parts
    step_error_s: float
    link: LinkFit | None = None
    bucket_bytes: tuple[float, ...] = ()
    seen_shares: tuple[tuple[float, float], ...] = ()
    element_bytes: int = 4
    trust: float | None = None

    @property
    def emulated(self) -> bool:
        """Whether the devices are emulated."""
        return any(device.emulated for device in self.devices)
