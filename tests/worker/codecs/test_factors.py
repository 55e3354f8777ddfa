"""PowerSGD of our own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.worker.codecs.factors import orthonormal
from hetkit.worker.codecs.registry import make_codec

SHAPE = [("w", (60, 50))]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 6),
    seed=st.integers(0, 99),
    exponent=st.integers(-30, 30),
)
@settings(max_examples=60, deadline=None)
def test_a_basis_is_orthonormal_and_spans_the_columns(rows, columns, seed, exponent):
    columns = min(columns, rows)
    given_ = 10.0**exponent * normal(seed, rows, columns)
    basis = orthonormal(given_)
    torch.testing.assert_close(basis.T @ basis, torch.eye(columns), rtol=0, atol=1e-5)
    scaled = given_.double() * 10.0**-exponent
    left = scaled - basis.double() @ (basis.double().T @ scaled)
    assert left.norm() < 1e-5 * scaled.norm()


def test_a_column_that_depends_on_others_becomes_zero():
    column = normal(0, 20, 1)
    basis = orthonormal(torch.cat([column, 2 * column, torch.zeros(20, 1)], 1))
    assert basis[:, 1:].count_nonzero() == 0
    assert not orthonormal(torch.tensor([[1.0], [math.nan]])).isfinite().all()


@pytest.mark.parametrize("text", ["powersgd", "powersgd(rank=4)"])
def test_nothing_is_lost_and_no_more_waits_than_was_given(group, text):
    ranks = group(lambda: make_codec(text), 3)
    arrived, given_ = torch.zeros(3000), torch.zeros(3000)
    for step in range(5):
        flats = [normal(10 * step + rank, 3000) for rank in range(3)]
        before = sum(codec.state_dict()["residuals"].get("w", 0) for codec in ranks.codecs)
        arrived += ranks.step(flats, SHAPE)
        given_ += sum(flats)
        waits = sum(codec.state_dict()["residuals"]["w"] for codec in ranks.codecs)
        assert waits.norm() <= (before + sum(flats)).norm() * (1 + 1e-5)
    torch.testing.assert_close(arrived + waits, given_, rtol=0, atol=1e-4)


def test_a_matrix_of_that_rank_arrives_whole(group):
    low = (normal(0, 60, 2) @ normal(1, 2, 50)).view(-1)
    got = group(lambda: make_codec("powersgd"), 2).step([low, 2 * low], SHAPE)
    torch.testing.assert_close(got, 3 * low, rtol=1e-4, atol=1e-4)


def test_the_start_turns_to_the_main_directions(group):
    matrix = (normal(0, 60, 50) + 5 * normal(1, 60, 2) @ normal(2, 2, 50)).view(-1)
    singular = torch.linalg.svdvals(matrix.view(60, 50))
    best = singular[2:].norm()
    ranks = group(lambda: make_codec("powersgd"), 2)
    for _ in range(8):
        for codec in ranks.codecs:  # without what waits: the matrix itself, again and again
            codec.load_state_dict(codec.state_dict() | {"residuals": {}})
        got = ranks.step([matrix, 0 * matrix], SHAPE)
    assert (got - matrix).norm() < 1.02 * best


def test_zeros_do_not_end_it(group):
    ranks = group(lambda: make_codec("powersgd"), 2)
    assert ranks.step([torch.zeros(3000)] * 2, SHAPE).count_nonzero() == 0
    assert ranks.step([normal(0, 3000)] * 2, SHAPE).norm() > 0


def test_ranks_that_start_differently_still_agree(group):
    """A rank that joined has no start yet."""
    ranks = group(lambda: make_codec("powersgd"), 2)
    ranks.step([normal(0, 3000), normal(1, 3000)], SHAPE)
    ranks.codecs[1] = make_codec("powersgd")
    assert ranks.step([normal(2, 3000), normal(3, 3000)], SHAPE).isfinite().all()
