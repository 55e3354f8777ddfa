import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.plan import Plan
from hetkit.worker.order import epoch_order, micro_batches, step_slice


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
