import numpy as np
import pytest
import torch

from hetkit.errors import LossError
from hetkit.worker.loss import measure


@pytest.mark.parametrize(
    ("returned", "mean", "count", "counted"),
    [
        (torch.tensor(2.0), 2.0, 8.0, False),
        (torch.tensor([[2.0]]), 2.0, 8.0, False),
        (0.5, 0.5, 8.0, False),
        (1, 1.0, 8.0, False),
        (np.float32(0.5), 0.5, 8.0, False),
        ((torch.tensor(2.0), 5), 2.0, 5.0, True),
        ([torch.tensor(2.0), torch.tensor(5)], 2.0, 5.0, True),
        ((torch.tensor(2.0), 0), 2.0, 0.0, True),
    ],
    ids=str,
)
def test_a_mean_counts_samples_and_a_pair_counts_what_it_says(returned, mean, count, counted):
    got = measure(returned, 8)
    assert (float(got[0]), got[1], got[2]) == (mean, count, counted)
    if isinstance(got[0], torch.Tensor):
        assert got[0].shape == ()


def test_a_sum_is_shown_as_the_mean_over_the_samples():
    mean, count, counted = measure(torch.tensor(12.0), 8, reduction="sum")
    assert (float(mean), count, counted) == (1.5, 8.0, False)
    assert float(measure(torch.tensor(0.0), 0, reduction="sum")[0]) == 0.0, "not 0 / 0"
    with pytest.raises(LossError, match='has reduction="sum": return the sum alone'):
        measure((torch.tensor(2.0), 5), 8, reduction="sum")


def test_the_gradient_passes_through():
    weight = torch.ones(1, requires_grad=True)
    mean, _, _ = measure(weight * 3, 1)
    mean.backward()
    assert weight.grad.item() == 3.0


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.zeros(4), r"shape \(4,\).*mean over the batch"),
        ((torch.zeros(2, 2), 4), r"shape \(2, 2\)"),
        (None, "NoneType"),
        ("1.0", "str"),
        ((torch.tensor(1.0), -1), "count -1"),
        ((torch.tensor(1.0), float("nan")), "count nan"),
        ((torch.tensor(1.0), float("inf")), "count inf"),
        ((torch.tensor(1.0), "many"), "count 'many'"),
        ((torch.tensor(1.0), None), "count None"),
        ((torch.tensor(1.0), torch.ones(3)), "count tensor"),
        ((torch.tensor(1.0), 2, 3), "tuple"),
    ],
    ids=str,
)
def test_anything_else_is_refused_by_name(returned, said):
    with pytest.raises(LossError, match=said):
        measure(returned, 8, name="accuracy")
    with pytest.raises(LossError, match="accuracy returned"):
        measure(returned, 8, name="accuracy")
