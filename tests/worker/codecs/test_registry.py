"""Every codec keeps what `hetkit.worker.codecs.codec` promises for it."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.compression import COMPRESSIONS
from hetkit.worker.codecs.registry import make_codec

ROUNDING = {"none": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}


class Replay:
    """A wire of several ranks in one process: the others' tensors are known beforehand."""

    def __init__(self, others: Sequence[torch.Tensor]) -> None:
        self.world_size = len(others) + 1
        self.sent: list[torch.Tensor] = []
        self._others = others

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.clone())
        for other in self._others:
            reals = torch.view_as_real(other) if other.is_complex() else other
            tensor += reals.to(tensor.dtype) if not tensor.is_complex() else other


def exchanged(name: str, *buckets: torch.Tensor) -> tuple[torch.Tensor, Replay]:
    mine, wire = buckets[0].clone(), Replay(buckets[1:])
    make_codec(name).exchange(mine, wire)
    return mine, wire


def test_the_settings_and_the_registry_name_the_same_codecs():
    assert [make_codec(name).name for name in COMPRESSIONS] == list(COMPRESSIONS)
    with pytest.raises(KeyError):
        make_codec("zip")
    assert set(ROUNDING) == set(COMPRESSIONS), "say how exact the new codec is"


def test_a_codec_is_made_afresh_for_each():
    assert all(make_codec(name) is not make_codec(name) for name in COMPRESSIONS)


@pytest.mark.parametrize("name", COMPRESSIONS)
@given(
    ranks=st.integers(1, 5),
    elements=st.sampled_from([0, 1, 2, 7, 1000]),
    seed=st.integers(0, 999),
    exponent=st.integers(-3, 3),
)
def test_the_sum_is_within_the_codecs_rounding(name, ranks, elements, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0**exponent
    buckets = [scale * torch.randn(elements, generator=generator) for _ in range(ranks)]
    got, _ = exchanged(name, *buckets)
    exact = torch.stack(buckets).double().sum(0)
    size = torch.stack(buckets).double().abs().sum(0)
    # One rounding when cast, one for each addition; fp16 is coarser below its normal numbers.
    allowed = (ROUNDING[name] + 2.0**-23) * (ranks + 1) * size + ranks * 6e-8 * (name == "fp16")
    assert got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(name, bad, rank):
    buckets = [torch.ones(9) for _ in range(3)]
    buckets[rank][4] = bad
    got, _ = exchanged(name, *buckets)
    assert not got[4].isfinite()
    assert torch.equal(got[:4], torch.full((4,), 3.0))


def test_what_fp16_cannot_hold_becomes_infinite_so_that_the_step_is_skipped():
    got, _ = exchanged("fp16", torch.tensor([7e4, 1.0]), torch.zeros(2))
    assert got.tolist() == [math.inf, 1.0]
    got, _ = exchanged("fp16", torch.tensor([4e4]), torch.tensor([4e4]))
    assert got.tolist() == [math.inf]
    got, _ = exchanged("bf16", torch.tensor([2.0**127]), torch.zeros(1))
    assert got.tolist() == [2.0**127]


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_keep_both_parts(name, dtype):
    mine = torch.complex(torch.linspace(-1, 1, 5), torch.linspace(2, 3, 5)).to(dtype)
    got, _ = exchanged(name, mine, 2 * mine)
    assert got.dtype == dtype
    torch.testing.assert_close(got, 3 * mine, rtol=4 * ROUNDING[name] + 1e-6, atol=0.02)


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_a_bucket_keeps_its_type_and_nothing_travels_larger_than_it_is(name, dtype):
    got, wire = exchanged(name, torch.ones(10, dtype=dtype), torch.ones(10, dtype=dtype))
    assert (got.dtype, got.tolist()) == (dtype, [2.0] * 10)
    (sent,) = wire.sent
    assert sent.element_size() <= dtype.itemsize
    stated = make_codec(name).wire_bytes(10, dtype.itemsize, world_size=2)
    assert stated == sent.numel() * sent.element_size(), "two ranks send the bucket once each"


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_one_rank_alone_sends_nothing(name):
    assert make_codec(name).wire_bytes(1000, 4, world_size=1) == 0.0
