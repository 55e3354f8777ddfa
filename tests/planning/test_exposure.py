"""Tests of what an exchange leaves exposed, of fitted links and of buckets."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.exposure import (
    Transfer,
    expected_max,
    expose,
    fit_link,
    pack_buckets,
    ready_shares,
)

sizes = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=8)


@st.composite
def exchanges(draw):
    """Ready times per rank, codec and transfer seconds of as many buckets."""
    buckets, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    gaps = st.lists(st.floats(0.0, 2.0), min_size=buckets, max_size=buckets)
    rows = [draw(gaps) for _ in range(ranks)]
    ready = [[math.fsum(row[: at + 1]) for at in range(buckets)] for row in rows]
    return ready, draw(gaps), draw(gaps)


@given(exchanges())
def test_the_step_ends_where_the_queue_ends(exchange):
    """The exposed parts are all that the queue of buckets adds to the slowest rank's compute."""
    ready, codec, transfer = exchange
    free = 0.0
    for at, (coding, sending) in enumerate(zip(codec, transfer, strict=True)):
        free = max(max(rank[at] for rank in ready), free) + coding + sending
    last = max(rank[-1] for rank in ready)
    assert expose(ready, codec, transfer).seconds == pytest.approx(max(0.0, free - last), abs=1e-9)


@given(exchanges(), st.floats(1.0, 5.0))
def test_a_slower_link_never_exposes_less(exchange, factor):
    ready, codec, transfer = exchange
    slower = [seconds * factor for seconds in transfer]
    assert expose(ready, codec, slower).seconds >= expose(ready, codec, transfer).seconds - 1e-9


@given(exchanges())
def test_at_least_the_last_bucket_is_exposed(exchange):
    ready, codec, transfer = exchange
    assert expose(ready, codec, transfer).seconds >= transfer[-1] + codec[-1] - 1e-9


def test_lists_that_differ_in_length_are_refused():
    with pytest.raises(PlanError, match="bucket"):
        expose([[1.0, 2.0]], [0.0], [1.0])


@given(st.floats(0.0, 1e-3), st.floats(1e-9, 1e-6), st.integers(2, 8))
def test_a_link_is_found_again_from_two_sizes(hop_s, byte_s, ranks):
    hops = 2 * (ranks - 1)
    seen = [
        Transfer(hops=hops, sent_bytes=size, seconds=hops * hop_s + size * byte_s)
        for size in (1e6, 2e7)
    ]
    link = fit_link(seen)
    assert link is not None
    assert link.certain
    for transfer in seen:
        expected = pytest.approx(transfer.seconds, rel=0.01)
        assert link.seconds(hops, transfer.sent_bytes) == expected


def test_noise_shows_in_the_error_and_one_size_is_not_certain():
    draw = random.Random(3)
    noisy = [
        Transfer(hops=2, sent_bytes=1e6, seconds=1e-3 * draw.gauss(1.0, 0.1)) for _ in range(40)
    ]
    link = fit_link(noisy)
    assert link is not None
    assert not link.certain
    assert 0.005 < link.error < 0.05


def test_nothing_that_travelled_gives_no_link():
    assert fit_link([]) is None
    assert fit_link([Transfer(hops=2, sent_bytes=0.0, seconds=1e-3)]) is None


@given(sizes, st.floats(1.0, 1e9) | st.none())
def test_buckets_hold_every_byte_once(tensors, limit):
    buckets = pack_buckets(tensors, limit)
    assert math.fsum(buckets) == pytest.approx(math.fsum(tensors))
    if limit is not None:
        assert all(size >= limit for size in buckets[:-1])


@given(sizes)
def test_shares_rise_to_the_end_of_the_pass(buckets):
    shares = ready_shares(buckets, [(0.5, 0.6)])
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == len(buckets)


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 1.0)), min_size=1, max_size=6),
)
def test_the_mean_of_the_latest_is_no_less_than_any_mean(ranks):
    middles, sigmas = [m for m, _ in ranks], [s for _, s in ranks]
    mean = expected_max(middles, sigmas)
    assert mean >= max(middles) - 0.01
    assert mean <= max(middles) + 3 * max(sigmas) + 0.01


def test_the_mean_of_the_latest_is_that_of_drawn_values():
    draw = random.Random(1)
    middles, sigmas = [1.0, 0.95, 0.7], [0.05, 0.1, 0.02]
    times = [
        max(draw.gauss(m, s) for m, s in zip(middles, sigmas, strict=True)) for _ in range(20_000)
    ]
    assert expected_max(middles, sigmas) == pytest.approx(sum(times) / len(times), rel=3e-3)
