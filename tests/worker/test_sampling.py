import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hetkit.errors import DataError
from hetkit.worker.sampling import draw, repetitions

DATA = list(range(10))
WEIGHTS = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 91.0]


def order(sampler, *, seed: int = 0, epoch: int = 0, limit: int | None = None) -> list[int]:
    drawn = draw(sampler, DATA, len(DATA), seed=seed, epoch=epoch, limit=limit)
    assert drawn.dtype == torch.int64
    return drawn.tolist()


def by_weight(dataset, generator):
    weights = torch.tensor(WEIGHTS[: len(dataset)])
    return torch.multinomial(weights, 20, replacement=True, generator=generator)


RANDOM = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 20),
    "weighted, own generator": lambda: WeightedRandomSampler(
        WEIGHTS, 20, generator=torch.Generator().manual_seed(9)
    ),
    "RandomSampler": lambda: RandomSampler(DATA, replacement=True, num_samples=20),
    "subset": lambda: SubsetRandomSampler(range(9)),
    "callable": lambda: by_weight,
    "global generators": lambda: lambda dataset, generator: torch.randperm(len(dataset)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_seed_and_epoch_alone_fix_what_is_drawn(kind):
    kept = RANDOM[kind]()
    first = order(kept)
    torch.rand(5)
    others = [order(kept, epoch=1), order(kept, seed=1)]
    assert order(kept) == order(RANDOM[kind]()) == first
    assert others == [order(RANDOM[kind](), epoch=1), order(RANDOM[kind](), seed=1)]
    assert first not in others


def test_drawing_leaves_the_global_generators_alone():
    before = torch.get_rng_state()
    order(RANDOM["global generators"]())
    assert torch.equal(torch.get_rng_state(), before)


class Told:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch, 0])


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ([3, 1], [3, 1]),
        (range(2, 5), [2, 3, 4]),
        (np.array([3, 1], dtype=np.int32), [3, 1]),
        (torch.tensor([4, 4]), [4, 4]),
        ((torch.tensor(2), np.int64(3)), [2, 3]),
        (SequentialSampler(DATA), DATA),
        (Told(), [5, 0]),
        (lambda dataset, generator: reversed(range(len(dataset))), DATA[::-1]),
    ],
)
def test_any_iterable_of_indices_is_an_order(sampler, expected):
    assert order(sampler, epoch=5) == expected


def test_a_limit_takes_the_first_of_what_never_ends():
    assert order(lambda dataset, generator: itertools.cycle([7, 2]), limit=3) == [7, 2, 7]
    assert order(torch.arange(9), limit=2) == [0, 1]


@pytest.mark.parametrize(
    ("sampler", "limit", "said"),
    [
        ([], None, "drew no index"),
        ([3, 10], None, "drew index 10, and the data has 10 samples: indices are 0 to 9"),
        ([-1], None, "drew index -1"),
        ([0, 1], 3, "drew 2 indices, and epoch_samples is 3"),
        ([0.5], None, "gave 0.5: it must give one int at a time"),
        ([True, False], None, "gave True"),
        ([[0, 1]], None, r"gave \[0, 1\]"),
        (torch.rand(3), None, r"float32 of shape \(3,\)"),
        (torch.zeros(3, 2, dtype=torch.int64), None, r"int64 of shape \(3, 2\)"),
        (torch.ones(3, dtype=torch.bool), None, "bool"),
        (lambda dataset, generator: 3, None, "returned int: return an iterable"),
        (BatchSampler(SequentialSampler(DATA), 2, False), None, "a BatchSampler does what hetkit"),
        (DistributedSampler(DATA, 2, 0), None, "a DistributedSampler does what hetkit does"),
    ],
)
def test_what_is_no_order_is_refused_with_a_reason(sampler, limit, said):
    with pytest.raises(DataError, match=said):
        order(sampler, limit=limit)


def test_an_error_of_the_users_sampler_is_raised_as_it_is():
    def broken(dataset, generator):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        order(broken)


@given(drawn=st.lists(st.integers(0, 5), min_size=1))
def test_repetitions_count_what_came_before(drawn):
    expected = [drawn[:place].count(index) for place, index in enumerate(drawn)]
    repeats = repetitions(torch.tensor(drawn))
    assert (repeats.tolist() if repeats is not None else [0] * len(drawn)) == expected
    assert (repeats is None) == (len(set(drawn)) == len(drawn))
