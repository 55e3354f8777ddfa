from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from hetkit.errors import DataError
from hetkit.worker.own.batches import cut

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    size: int


X = torch.arange(8).reshape(4, 2)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[1:3]),
        ((X, X.T), (X[1:3], X.T)),
        ([X, ["a", "b", "c", "d"]], [X[1:3], ["b", "c"]]),
        ({"x": X, "name": "all"}, {"x": X[1:3], "name": "all"}),
        (Pair(X, torch.tensor(3.0)), Pair(X[1:3], torch.tensor(3.0))),
        (Record(X, 4), Record(X[1:3], 4)),
        ([X[0], X[1], X[2], X[3]], [X[1], X[2]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_piece_has_the_samples_of_all_that_is_per_sample(batch, expected):
    assert str(cut(batch, 1, 3, size=4)) == str(expected)


def test_nothing_can_be_cut_to_no_samples():
    assert cut((X, X), 0, 0, size=4)[1].shape == (0, 2)


def test_a_batch_without_samples_cannot_be_cut():
    with pytest.raises(DataError, match="cannot be cut into pieces"):
        cut({"x": torch.ones(3)}, 0, 2, size=4)
