"""Every codec keeps what `hetkit.worker.codecs.codec` promises for it."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetkit.compression import COMPRESSIONS, Custom
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.plain import Plain
from hetkit.worker.codecs.registry import make_codec

SHAPES = [("a.bias", (3,)), ("a.weight", (40, 50)), ("b.weight", (70, 31)), ("c", ()), ("b", (9,))]
ELEMENTS = sum(math.prod(shape) for _, shape in SHAPES)
LITTLE = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def gradients(ranks: int, seed: int = 0, elements: int = ELEMENTS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator) for _ in range(ranks)]


def test_the_settings_and_the_registry_name_the_same_codecs():
    assert [make_codec(name).name for name in COMPRESSIONS] == list(COMPRESSIONS)


def test_a_codec_is_made_afresh_for_each():
    assert all(make_codec(name) is not make_codec(name) for name in COMPRESSIONS)


def test_a_tasks_own_codec_is_made_by_its_key():
    assert isinstance(make_codec(str(Custom("mine")), {"mine": Plain}), Plain)


@pytest.mark.parametrize("name", COMPRESSIONS)
@given(ranks=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 99), exponent=st.integers(-30, 30))
@LITTLE
def test_all_ranks_end_with_the_same_bits_and_about_the_sum(group, name, ranks, seed, exponent):
    if name == "fp16":
        exponent //= 10
    flats = [10.0**exponent * flat for flat in gradients(ranks, seed)]
    ranks = group(lambda: make_codec(name), ranks)
    got, exact = ranks.step(flats, SHAPES).double(), torch.stack(flats).double().sum(0)
    # Whatever does not travel or is rounded is at most about as large as what was given.
    assert (got - exact).norm() <= 1.01 * exact.norm()
    assert got @ exact > 0
    raw = [got[:3] - exact[:3], got[-10:] - exact[-10:]]
    bound = {"fp16": 2**-9, "bf16": 2**-6}.get(name, 1e-6)
    assert all(part.abs().max() <= bound * 10.0**exponent * 20 for part in raw), "1-D goes as it is"


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("elements", [0, 1, 2, 7, 1025])
@pytest.mark.parametrize("shaped", [lambda n: (n,), lambda n: (1, n), lambda n: (n, 1)])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-42, 3e38, -2e37])
def test_any_size_and_any_value(group, name, elements, shaped, value):
    flats = [torch.full((elements,), value), torch.zeros(elements), torch.zeros(elements)]
    got = group(lambda: make_codec(name), 3).step(flats, [("w", shaped(elements))])
    if name == "fp16" and abs(value) > 65504:
        assert not got.isfinite().any(), "so that the step is skipped"
    else:
        assert got.isfinite().all()
        assert (got.abs() <= 1.01 * abs(value)).all()


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", [0, 5, 1500, ELEMENTS - 1])
def test_what_is_not_finite_on_one_rank_is_not_on_any(group, name, bad, rank, place):
    ranks = group(lambda: make_codec(name), 3)
    ranks.step(gradients(3), SHAPES)
    before = [codec.state_dict() | {"step": 0} for codec in ranks.codecs]
    flats = gradients(3, seed=1)
    flats[rank][place] = bad
    got = ranks.step(flats, SHAPES)
    assert not got.isfinite().all()
    after = [codec.state_dict() | {"step": 0} for codec in ranks.codecs]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert ranks.step(gradients(3, seed=2), SHAPES).isfinite().all()


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_keep_both_parts(group, name, dtype):
    mine = torch.complex(torch.linspace(-1, 1, 2000), torch.linspace(1, -1, 2000)).to(dtype)
    got = group(lambda: make_codec(name), 2).step([mine, 2 * mine], [("w", (40, 50))])
    assert got.dtype == dtype
    assert got.real.abs().max() > 0
    assert got.imag.abs().max() > 0


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_bucket_keeps_its_type_and_sends_what_is_stated(group, name, dtype, ranks):
    flats = [flat.to(dtype) for flat in gradients(ranks)]
    many = group(lambda: make_codec(name), ranks)
    got = many.step(flats, SHAPES)
    assert got.dtype == dtype
    assert got.isfinite().all()
    pieces = Bucket.of(got, SHAPES).pieces
    stated = make_codec(name).wire_bytes(pieces, dtype.itemsize, ranks)
    assert many.sent_bytes == pytest.approx([stated] * ranks)


def test_what_fp16_cannot_hold_becomes_infinite_so_that_the_step_is_skipped(group):
    def two(name: str, *values: float) -> list[float]:
        flats = [torch.tensor([value]) for value in values]
        return group(lambda: make_codec(name), 2).step(flats).tolist()

    assert two("fp16", 7e4, 0.0) == [math.inf]
    assert two("fp16", 4e4, 4e4) == [math.inf]
    assert two("bf16", 2.0**127, 0.0) == [2.0**127]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_one_rank_alone_sends_nothing(name):
    pieces = Bucket.of(torch.zeros(1000), [("w", (10, 100))]).pieces
    assert make_codec(name).wire_bytes(pieces, 4, world_size=1) == 0.0
