"""Top-k and threshold: what arrived and what waits add up to what was given."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetkit.worker.codecs.registry import make_codec

SHAPES = [("b", (30,)), ("v", (40, 25)), ("w", (60, 50))]
ELEMENTS = 4030


def normal(seed: int, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def waiting(ranks, shapes=SHAPES) -> torch.Tensor:
    """The sum over ranks of what waits, laid out as the bucket."""
    total = []
    for name, shape in shapes:
        size = torch.Size(shape).numel()
        rests = [codec.state_dict()["residuals"].get(name) for codec in ranks.codecs]
        total.append(sum((r for r in rests if r is not None), start=torch.zeros(size)))
    return torch.cat(total)


@pytest.mark.parametrize("kind", ["topk", "threshold"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@given(
    world_size=st.sampled_from([2, 3, 4]),
    ratio=st.sampled_from([0.001, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nothing_is_lost(group, kind, dtype, world_size, ratio, seed):
    ranks = group(lambda: make_codec(f"{kind}(ratio={ratio})"), world_size)
    arrived, given_ = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(4):
        flats = [normal(100 * seed + 10 * step + r).to(dtype) for r in range(world_size)]
        arrived += ranks.step(flats, SHAPES).float()
        given_ += sum(flat.float() for flat in flats)
    left = arrived + waiting(ranks) - given_
    near = 1e-4 if dtype != torch.bfloat16 else 0.25  # biases are summed in the bucket's type
    assert left.abs().max() < near
    if dtype == torch.bfloat16:
        assert left[30:].abs().max() < 0.05


def test_one_top_k_leaves_no_more_than_its_bound(group):
    for ratio in (0.01, 0.1, 0.5):
        codec = f"topk(ratio={ratio}, small_bytes=0)"
        ranks = group(lambda codec=codec: make_codec(codec), 2)
        x = normal(0, 1000)
        ranks.step([x, torch.zeros(1000)], [("w", (1000,))])
        rest = waiting(ranks, [("w", (1000,))])
        assert rest.norm() ** 2 <= (1 - ratio) * x.norm() ** 2


def test_the_largest_travel(group):
    x = torch.arange(1.0, 101.0)
    ranks = group(lambda: make_codec("topk(ratio=0.1, small_bytes=0)"), 2)
    got = ranks.step([x, x], [("w", (100,))])
    assert got.nonzero().view(-1).tolist() == [*range(45, 50), *range(95, 100)]
    assert torch.equal(got[95:], 2 * x[95:])


def test_every_place_of_a_long_segment_can_be_told(group):
    elements = 2 * 65_536
    for place in (0, 32_767, 32_768, 65_535, 65_536, elements - 1):
        x = torch.zeros(elements)
        x[place] = 1.0
        for kind in ("topk", "threshold"):
            ranks = group(lambda kind=kind: make_codec(f"{kind}(ratio=0.001)"), 2)
            got = ranks.step([x, x], [("w", (2, 65_536))])
            assert got[place] + waiting(ranks, [("w", (2, 65_536))])[place] == 2.0
            assert kind == "threshold" or got[place] == 2.0


def test_threshold_sends_mostly_the_largest(group):
    x = normal(3, 60_000)
    got = group(lambda: make_codec("threshold"), 2).step([x, 0 * x], [("w", (60, 1000))])
    best = group(lambda: make_codec("topk"), 2).step([x, 0 * x], [("w", (60, 1000))])
    assert got.norm() > 0.85 * best.norm()


@pytest.mark.parametrize("text", ["topk", "threshold", "powersgd"])
def test_residuals_belong_to_parameters_whatever_the_buckets(group, text):
    """The same gradients in two buckets, in another order, then go on as in one."""
    one, two = (group(lambda: make_codec(text), 2) for _ in range(2))
    flats = [normal(1), normal(2)]
    one.step(flats, SHAPES)
    for old, new in zip(one.codecs, two.codecs, strict=True):
        new.load_state_dict(old.state_dict())
    before = waiting(two)
    assert torch.equal(before, waiting(one))
    zeros = torch.zeros(3000)
    first = two.sum([zeros, zeros], [("w", (60, 50))])[0]
    second = two.sum([zeros[:1030]] * 2, [("v", (40, 25)), ("b", (30,))])[0]
    for codec in two.codecs:
        codec.settle(True)
    arrived = torch.cat([second[1000:], second[:1000], first])
    torch.testing.assert_close(arrived + waiting(two), before, rtol=0, atol=1e-4)
    assert arrived.norm() > 0


@pytest.mark.parametrize("text", ["topk", "threshold", "powersgd"])
def test_a_skipped_step_leaves_no_trace(group, text):
    ranks, other = (group(lambda: make_codec(text), 2) for _ in range(2))
    for each in (ranks, other):
        each.step([normal(1), normal(2)], SHAPES)
    bad = normal(3)
    bad[7] = float("inf")
    ranks.step([normal(4), bad], SHAPES)
    last = [normal(5), normal(6)]
    assert torch.equal(ranks.step(last, SHAPES), other.step(last, SHAPES))
    norms = [codec.residual_norm() for codec in ranks.codecs]
    assert norms == [codec.residual_norm() for codec in other.codecs]
    assert all(norm > 0 for norm in norms)
