import itertools
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from hetkit.errors import DataError
from hetkit.worker.data import open_samples, to_device

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("data", [Squares(), Many(), Squares, Many])
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
        return itertools.count()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Endless(), "Endless has no length: say how many samples .* epoch_samples"),
        (iter([1, 2]), "list_iterator can be read only once"),
        (DataLoader(Squares()), "give its dataset"),
        (torch.tensor(3.0), "no dimension"),
        (np.float64(3.0), "has no length"),
        ([], "no samples"),
        (torch.zeros(0, 3), "no samples"),
        (lambda: [], "no samples"),
        ((torch.zeros(3), torch.zeros(4)), r"differ in length: \[3, 4\]"),
    ],
)
def test_what_cannot_be_trained_on_says_why(data, said):
    with pytest.raises(DataError, match=said):
        open_samples(data, None)


# ── augmentation ──


class Noisy(Dataset):
    """Draws from all three global generators, and counts how it is asked."""

    def __init__(self) -> None:
        self.asked = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int):
        self.asked.append(index)
        return index, random.random(), np.random.rand(), float(torch.rand(()))


def as_rows(batch):
    return batch


def noise(index: int, *, seed: int = 1, epoch: int = 0, repeats=None):
    samples = open_samples(Noisy(), as_rows, seed=seed)
    (row,) = samples.fetch([index], epoch=epoch, repeats=repeats)
    return row


def test_a_samples_noise_is_the_same_in_whatever_batch_and_order():
    samples = open_samples(Noisy(), as_rows, seed=1)
    together = samples.fetch([3, 8, 5])
    assert samples.fetch([5]) + samples.fetch([3]) == [together[2], together[0]]
    assert [noise(3), noise(8), noise(5)] == together


def test_noise_differs_by_index_epoch_seed_and_repetition():
    rows = [noise(3), noise(4), noise(3, epoch=1), noise(3, seed=2), noise(3, repeats=[1])]
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == len(rows)


def test_the_steps_own_random_numbers_are_left_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    open_samples(Noisy(), None).fetch([1, 2])
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


def test_a_subset_of_an_augmenting_dataset_is_seeded_by_its_own_indices():
    subset = open_samples(Subset(Noisy(), [7, 2, 4]), as_rows, seed=1)
    together = subset.fetch([2, 0])
    assert [row[0] for row in together] == [4, 7]
    assert together == subset.fetch([2]) + subset.fetch([0])


def test_turned_off_the_numbers_go_on_from_sample_to_sample():
    samples = open_samples(Noisy(), as_rows, seeded=False)
    torch.manual_seed(5)
    first, second = samples.fetch([3]), samples.fetch([3])
    assert first != second
    torch.manual_seed(5)
    assert samples.fetch([3])[0][3] == first[0][3]


class Whole(Dataset):
    """Knows no single samples."""

    def __len__(self) -> int:
        return 6

    def __getitems__(self, indices: list[int]):
        return [(len(indices), index, random.random()) for index in indices]


def test_a_dataset_of_whole_batches_is_asked_for_one_sample_at_a_time_unless_turned_off():
    rows = open_samples(Whole(), as_rows).fetch([2, 1])
    assert [row[:2] for row in rows] == [(1, 2), (1, 1)]
    assert open_samples(Whole(), as_rows).fetch([1]) == rows[1:]
    rows = open_samples(Whole(), as_rows, seeded=False).fetch([2, 1])
    assert [row[:2] for row in rows] == [(2, 2), (2, 1)]


def masking(rows):
    return [row[0] for row in rows], float(torch.rand(()))


@pytest.mark.parametrize("data", [Noisy(), [(i,) for i in range(10)]], ids=["dataset", "list"])
def test_what_is_random_in_collate_is_reproducible_for_the_same_micro_batch(data):
    samples = open_samples(data, masking, seed=1)
    assert samples.fetch([3, 8]) == samples.fetch([3, 8])
    assert samples.fetch([3, 8])[1] != samples.fetch([3, 8], epoch=1)[1]


Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Words:
    tokens: torch.Tensor
    lengths: list[int]


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


def test_packed_sequences_dataclasses_and_kinds_of_dicts_move_whole():
    words = [torch.ones(3, 2), torch.ones(1, 2)]
    packed = torch.nn.utils.rnn.pack_sequence(words)
    moved = to_device({"p": packed}, torch.device("meta"))["p"]
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta, "its sizes stay on the CPU"
    batch = to_device(Words(tokens=X, lengths=[1, 2]), torch.device("meta"))
    assert batch.tokens.is_meta
    assert batch.lengths == [1, 2]
    ordered = to_device(OrderedDict(a=X), torch.device("meta"))
    assert isinstance(ordered, OrderedDict)
    assert ordered["a"].is_meta
