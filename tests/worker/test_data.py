from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

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
