import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.errors import DataError
from hetkit.plan import Plan
from hetkit.worker.data import open_samples
from hetkit.worker.order import EpochOrder, epoch_order, micro_batches, step_slice
from hetkit.worker.stream import StreamSamples


def make_plan(batches, samples: int, *, micro_batch: int = 1 << 30, first: int = 0) -> Plan:
    total = sum(batches)
    return Plan(
        version=1,
        epoch=0,
        first_step=first,
        epoch_first_step=first,
        epoch_steps=-(-samples // total),
        global_batch=total,
        batches=tuple(batches),
        micro_batches=(micro_batch,) * len(batches),
        amp=("off",) * len(batches),
        compression="none",
    )


@given(
    batches=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
    samples=st.integers(1, 300),
    micro_batch=st.integers(1, 40),
    first=st.integers(0, 1000),
)
def test_the_ranks_slices_cover_the_epochs_order_exactly_once(batches, samples, micro_batch, first):
    plan = make_plan(batches, samples, micro_batch=micro_batch, first=first)
    seen = []
    for step in range(plan.first_step, plan.last_step + 1):
        start, shares = step_slice(plan, step, samples)
        for rank, share in enumerate(shares):
            pieces = micro_batches(start + sum(shares[:rank]), share, micro_batch)
            sizes = [stop - begin for begin, stop in pieces]
            assert sum(sizes) == share
            assert len(sizes) == -(-share // micro_batch), "the fewest"
            assert max(sizes, default=0) - min(sizes, default=0) <= 1, "the most even"
            seen += [place for begin, stop in pieces for place in range(begin, stop)]
    assert seen == list(range(samples))


@given(samples=st.integers(1, 200), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_an_epochs_order_is_a_permutation_that_seed_and_epoch_fix(samples, seed, epoch):
    order = epoch_order(samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(samples))
    assert torch.equal(order, epoch_order(samples, seed, epoch))


def test_epochs_and_seeds_differ_and_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert torch.equal(torch.random.get_rng_state(), before)


# ── the order of an epoch ──

LETTERS = open_samples(list("abcdefg"), None)


def drawn(order: EpochOrder, batches: tuple[int, ...], micro_batch: int) -> list[tuple[int, int]]:
    plan = make_plan(batches, len(order), micro_batch=micro_batch)
    pieces = [
        list(zip(draw.indices, draw.repeats or [0] * len(draw.indices), strict=True))
        for rank in range(len(batches))
        for draw in order.draws(plan, rank)
    ]
    assert all(len(piece) <= micro_batch for piece in pieces)
    return sorted(each for piece in pieces for each in piece)


@given(
    indices=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    batches=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum).map(tuple),
    micro_batch=st.integers(1, 5),
)
def test_every_split_draws_each_sample_and_each_repetition_once(indices, batches, micro_batch):
    order = EpochOrder(LETTERS, indices, seed=0)
    assert order.take(0) == len(indices)
    expected = [(index, indices[:place].count(index)) for place, index in enumerate(indices)]
    assert drawn(order, batches, micro_batch) == sorted(expected)


def test_without_a_sampler_an_epoch_is_a_permutation_and_a_stream_is_as_it_comes():
    order = EpochOrder(LETTERS, seed=3)
    assert order.take(2) == 7
    assert torch.equal(order.indices, epoch_order(7, 3, 2))
    stream = EpochOrder(StreamSamples(range(50), 4, None), seed=3)
    assert stream.take(2) == 4
    assert stream.indices.tolist() == [0, 1, 2, 3]


def test_all_epochs_have_as_many_samples():
    sizes = iter([3, 3, 4])
    order = EpochOrder(LETTERS, lambda dataset, generator: range(next(sizes)), seed=0)
    assert order.take(0) == order.take(0) == order.take(1) == 3
    with pytest.raises(DataError, match="drew 4 samples for epoch 3 and 3 for epoch 2"):
        order.take(2)


@pytest.mark.parametrize(
    ("samples", "sampler", "limit", "said"),
    [
        (StreamSamples(range(50), 4, None), [0], None, "a stream is read in its own order"),
        (LETTERS, None, 3, "epoch_samples is for a stream or a sampler"),
    ],
    ids=["sampled stream", "short epoch"],
)
def test_what_does_not_fit_together_is_refused(samples, sampler, limit, said):
    with pytest.raises(DataError, match=said):
        EpochOrder(samples, sampler, seed=0, epoch_samples=limit)
