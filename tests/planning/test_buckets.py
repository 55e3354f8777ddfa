import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.buckets import SMALLEST_BYTES, propose_buckets
from hetkit.planning.exposure import LinkFit
from hetkit.planning.situation import CodecCost

TENSORS = st.lists(st.floats(1e3, 5e7), min_size=1, max_size=30)
COMPUTE = st.lists(st.floats(0.01, 2.0), min_size=2, max_size=6)


def make_link(hop_s, rate):
    return LinkFit(hop_s=hop_s, byte_s=1 / rate, error=0.0, certain=True)


LINKS = st.builds(make_link, st.floats(0.0, 0.01), st.floats(1e7, 1e10))


def simulate(tensors, compute_s, link, limit):
    """Plays a step tensor by tensor: the backward fills buckets, one queue sends them."""
    n, whole = len(compute_s), sum(tensors)
    done = filled = free = 0.0
    for place, size in enumerate(tensors):
        done, filled = done + size, filled + size
        if filled < limit and place < len(tensors) - 1:
            continue
        share = 1.0 if place == len(tensors) - 1 else 1 / 3 + 2 / 3 * done / whole
        ready = max(compute_s) * share
        sent = 2 * (n - 1) / n * filled
        free = max(ready, free) + 2 * (n - 1) * link.hop_s + sent * link.byte_s
        filled = 0.0
    return free - max(compute_s)


@given(
    tensors=TENSORS, compute_s=COMPUTE, link=LINKS, present=st.sampled_from([None, 2**16, 2**24])
)
def test_each_size_costs_what_a_simulation_says_and_none_beats_the_best(
    tensors, compute_s, link, present
):
    proposal = propose_buckets(tensors, compute_s, link, present_bytes=present)
    for choice in proposal.choices[:-1]:
        played = simulate(tensors, compute_s, link, choice.bucket_bytes)
        assert choice.exposed_s == pytest.approx(played, rel=1e-6, abs=1e-9)
    assert proposal.best.exposed_s <= proposal.present.exposed_s
    if proposal.changes:
        assert proposal.best.exposed_s == min(c.exposed_s for c in proposal.choices)
        assert proposal.gain > 0.02
    else:
        assert proposal.gain == 0.0


def test_where_latency_rules_all_goes_in_one_bucket():
    proposal = propose_buckets([1e6] * 32, [0.05] * 4, make_link(0.02, 1e10), present_bytes=2**20)
    assert proposal.best.buckets == 1


def test_where_the_rate_rules_many_small_ones_go():
    proposal = propose_buckets([1e6] * 32, [0.05] * 4, make_link(0.0, 1e9), present_bytes=2**30)
    assert proposal.best.buckets == 32


def test_in_between_the_number_is_near_the_formula():
    """K = √(R/λ) for 256 equal tensors whose exchange is far slower than the computing is long."""
    compute_s, hop_s, whole_bytes, n = 1.0, 0.005, 256e6, 2
    link = make_link(hop_s, whole_bytes / 0.64)
    proposal = propose_buckets([1e6] * 256, [compute_s] * n, link, present_bytes=2**30)
    formula = (0.64 / (2 * hop_s)) ** 0.5
    assert formula / 2 <= proposal.best.buckets <= formula * 2


def test_one_rank_sends_nothing_so_nothing_changes():
    proposal = propose_buckets([1e6] * 4, [0.1], make_link(0.01, 1e8))
    assert not proposal.changes
    assert proposal.present.exposed_s == 0.0


def test_a_gain_within_the_link_s_own_error_is_none():
    link = LinkFit(hop_s=0.0, byte_s=1e-9, error=0.9, certain=True)
    assert not propose_buckets([1e6] * 32, [0.05] * 4, link, present_bytes=2**30).changes


def test_a_codec_s_bytes_and_seconds_count():
    link = make_link(0.0, 1e8)
    cost = CodecCost(element_s=1e-9, element_error=0.0, ring_share=0.25, half_rounds=2)
    plain = propose_buckets([4e6], [0.1, 0.1], link)
    coded = propose_buckets([4e6], [0.1, 0.1], link, cost=cost)
    assert plain.present.exposed_s == pytest.approx(0.04)
    assert coded.present.exposed_s == pytest.approx(0.04 / 4 + 1e6 * 1e-9)


def test_the_sizes_can_be_set():
    from hetkit.settings import Settings

    for choice in propose_buckets([1e6] * 4, [0.1, 0.1], make_link(0.01, 1e8)).choices:
        Settings(bucket_bytes=choice.bucket_bytes)
    assert SMALLEST_BYTES >= 1024


@pytest.mark.parametrize(("tensors", "compute_s"), [([], [0.1]), ([1.0, 0.0], [0.1]), ([1.0], [])])
def test_nothing_to_send_or_nobody_is_refused(tensors, compute_s):
    with pytest.raises(PlanError, match="a bucket size needs ranks and tensors above 0 bytes"):
        propose_buckets(tensors, compute_s, make_link(0.01, 1e8))
