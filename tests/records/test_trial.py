"""Tests of a trial's findings, put together over the ranks."""

from dataclasses import dataclass, field

import pytest

from hetkit.planning.exposure import Transfer
from hetkit.planning.situation import CodecCost
from hetkit.records.trial import Trial


@dataclass
class Findings:
    """What one rank found."""

    element_s: float
    seconds: float
    fixed_bytes: float = 100.0
    shapes: tuple = ((10, 20), (10,))
    element_bytes: int = 4
    costs: dict = field(default_factory=dict)
    transfers: tuple = ()
    bucket_bytes: tuple = (840.0,)
    spans: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costs["int8"] = CodecCost(
            element_s=self.element_s, element_error=0.1, ring_share=0.25, half_rounds=2
        )
        self.spans["int8"] = ((self.seconds, 0.1), (self.seconds, 0.3))
        self.transfers = (Transfer(hops=2, sent_bytes=100.0, seconds=self.seconds),)


def test_the_slowest_rank_encodes_and_the_last_to_come_saw_the_link_alone():
    whole = Trial.of([Findings(1e-9, 0.5), Findings(3e-9, 0.2, fixed_bytes=120.0)])
    assert whole.costs["int8"].element_s == 3e-9
    assert whole.transfers[0].seconds == 0.2
    assert whole.wire_s["int8"] == pytest.approx(0.4)
    assert whole.fixed_bytes == 120.0
    assert whole.tensor_bytes == pytest.approx((800.0, 40.0))
