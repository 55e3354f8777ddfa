from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hetkit.errors import DataError
from hetkit.plan import Plan
from hetkit.worker.data import (
    Loader,
    epoch_order,
    micro_batches,
    open_samples,
    step_slice,
    to_device,
)

CPU = torch.device("cpu")


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


# ── the order and its slices ──


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


# ── what data may be ──

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Squares:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        return torch.tensor([index, index**2]), index


class Many(Squares):
    """Fetches a whole batch at once, as Hugging Face's datasets do."""

    def __getitems__(self, indices: list[int]):
        return [self[index] for index in indices]

    def __getitem__(self, index: int):
        return super().__getitem__(index)


PAIRS = {
    "tuple of tensors": (X, Y),
    "tuple of arrays": (X.numpy(), Y.numpy()),
    "TensorDataset": TensorDataset(X, Y),
    "list": [(X[i], int(Y[i])) for i in range(6)],
    "dataset": Subset(TensorDataset(X, Y), range(6)),
    "callable": lambda: (X, Y),
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_pairs_gives_the_same_batch(form):
    samples = open_samples(PAIRS[form], None)
    assert len(samples) == 6
    x, y = samples.fetch([4, 0, 5])
    assert torch.equal(x, X[[4, 0, 5]])
    assert y.tolist() == [4, 0, 5]


@pytest.mark.parametrize("data", [X, X.numpy(), lambda: X], ids=["tensor", "array", "callable"])
def test_a_tensor_alone_gives_tensors(data):
    assert torch.equal(open_samples(data, None).fetch(range(2)), X[:2])


@pytest.mark.parametrize("data", [Squares(), Many(), Squares, Many], ids=repr)
def test_datasets_and_classes_of_them_are_collated(data):
    x, y = open_samples(data, None).fetch([3, 2])
    assert x.tolist() == [[3, 9], [2, 4]]
    assert y.tolist() == [3, 2]


def test_the_users_collate_gets_single_samples_of_any_form():
    for data in ((X, Y), TensorDataset(X, Y), PAIRS["list"]):
        got = open_samples(data, lambda batch: {"n": len(batch), "x": batch[0][0]}).fetch([1, 2])
        assert got["n"] == 2, "a tuple of tensors is not a dataset of two"
        assert torch.equal(got["x"], X[1])


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Endless(), "Endless has no length"),
        (iter([1, 2]), "list_iterator has no length"),
        (torch.tensor(3.0), "no dimension"),
        (np.float64(3.0), "has no length"),
        ([], "no samples"),
        (torch.zeros(0, 3), "no samples"),
        (lambda: [], "no samples"),
        ((torch.zeros(3), torch.zeros(4)), r"differ in length: \[3, 4\]"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_on_says_why(data, said):
    with pytest.raises(DataError, match=said):
        open_samples(data, None)


# ── loading ──


@pytest.mark.parametrize("data", [(X, Y), Squares()], ids=["arrays", "dataset"])
def test_worker_processes_fetch_what_the_rank_itself_would(data):
    samples = open_samples(data, None)
    schedules = [[[0, 5], [1], [2, 3, 4]], [[5, 4], [3]], [[0], [1], [2]]]
    inside, outside = Loader(samples, 0), Loader(samples, 2)
    for schedule in schedules:
        inside.start(schedule)
        outside.start(schedule)
        for _ in schedule[:-1]:  # the last is fetched ahead, and dropped by the next plan
            assert str(outside.next()) == str(inside.next())
    outside._loader._iterator._shutdown_workers()


def test_a_rank_without_samples_may_have_nothing_to_load():
    for num_workers in (0, 1):
        loader = Loader(open_samples((X, Y), None), num_workers)
        loader.start([])
        loader.start([[2]])
        assert loader.next()[1].tolist() == [2]
        if loader._loader is not None:
            loader._loader._iterator._shutdown_workers()


Point = namedtuple("Point", "x y")


def test_batches_of_any_nesting_move_and_keep_their_types():
    batch = {"a": [X, (Y, "text")], "p": Point(X, 3), "n": None}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["p"], Point)
    assert moved["p"].x.is_meta
    assert moved["n"] is None
    assert to_device(X, CPU) is X
