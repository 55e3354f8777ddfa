"""int8 and int4 keep their stated bounds."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetkit.compression import parse_compression
from hetkit.planning.codec_bytes import cut_for
from hetkit.worker.codecs.registry import make_codec

LEVELS = {"int8": 127, "int4": 7}


def blocks(values: torch.Tensor, text: str, world_size: int) -> torch.Tensor:
    """The largest magnitude of each element's block."""
    cut = cut_for(parse_compression(text), values.numel(), world_size)
    padded = torch.zeros(world_size * cut.count * cut.length, dtype=values.dtype)
    padded[: values.numel()] = values
    largest = padded.view(-1, cut.length).abs().amax(-1, keepdim=True)
    return largest.expand(-1, cut.length).reshape(-1)[: values.numel()]


@pytest.mark.parametrize("name", LEVELS)
@given(
    ranks=st.sampled_from([2, 3, 4]),
    elements=st.integers(1, 700),
    block=st.sampled_from([16, 17, 64]),
    seed=st.integers(0, 999),
    exponent=st.integers(-45, 36),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_error_is_within_its_bound(group, name, ranks, elements, block, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    flats = [
        10.0**exponent * torch.randn(elements, generator=generator).pow(3) for _ in range(ranks)
    ]
    text = f"{name}(block={block}, small_bytes=0)"
    got = group(lambda: make_codec(text), ranks).step(flats).double()
    exact = torch.stack(flats).double().sum(0)
    given_ = sum(blocks(flat.double(), text, ranks) for flat in flats)
    # The sum as added up is at most what was given and its own error away.
    added = blocks(exact, text, ranks) + given_ / LEVELS[name]
    steps = 0.5 if name == "int8" else 1.0
    bound = steps * (given_ + added) / LEVELS[name] + 1e-6 * given_ + (ranks + 1) * 1e-36
    assert ((got - exact).abs() <= bound).all()


def test_int4_is_right_on_average(group):
    generator = torch.Generator().manual_seed(0)
    flats = [torch.randn(2048, generator=generator) for _ in range(2)]
    ranks, exact = group(lambda: make_codec("int4(small_bytes=0)"), 2), flats[0] + flats[1]
    draws = 200
    got = torch.stack([ranks.step(flats) for _ in range(draws)])
    error = got - exact
    assert (error.mean(0).abs() < 6 * error.std(0) / math.sqrt(draws) + 1e-3).all()
    assert error.mean().abs() < 0.01


def test_int4_can_be_repeated_from_its_state(group):
    flats = [torch.randn(500), torch.randn(500)]
    first = group(lambda: make_codec("int4(small_bytes=0)"), 2)
    first.step(flats)
    second = group(lambda: make_codec("int4(small_bytes=0)"), 2)
    for old, new in zip(first.codecs, second.codecs, strict=True):
        new.load_state_dict(old.state_dict())
    third = first.step(flats)
    assert torch.equal(third, second.step(flats))
    assert not torch.equal(third, first.step(flats)), "the noise is another in each step"
