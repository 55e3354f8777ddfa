import random

import numpy as np
import pytest
import torch

import hetkit as hk
from hetkit.errors import LossError, TaskError
from hetkit.worker.data import open_samples
from hetkit.worker.probe import Probe, probe

CPU = torch.device("cpu")
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Net(torch.nn.Module):
    """Has statistics, randomness, a buffer that it replaces, and a head that nothing looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.ReLU()
        )
        self.head, self.unused = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.scratch = self.scratch + 1
        hidden = self.body(x)
        self.unused(hidden)
        return self.head(hidden)


def squares(model, batch):
    return model(batch).square().mean()


def run(model: torch.nn.Module, loss=squares, **given) -> Probe:
    task = hk.Task(model=lambda: model, data=X, loss=loss, optimizer=torch.optim.SGD)
    values = {"size": 4, "device": CPU, "repeats": 2, **given}
    return probe(task, model, open_samples(X, None), **values)


def test_nothing_is_left_of_it():
    torch.manual_seed(0)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    run(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert model.scratch == 0
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert model.training


def test_nothing_is_left_of_one_that_fails_either():
    model = torch.nn.BatchNorm1d(4)

    def fail(model, batch):
        model(batch)
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        run(model, fail)
    assert model.num_batches_tracked == 0


def test_parameters_without_a_gradient_are_named_frozen_ones_are_not():
    assert run(Net()).unused == ("unused.weight", "unused.bias")


def test_the_figures_are_per_sample():
    found = run(torch.nn.Linear(4, 1000), size=8)
    assert found.sample_s > 0
    assert found.sample_bytes >= 4 * 1000, "what the square keeps of the output"
    assert found.sample_bytes < 4 * 4 * 1000, "and not the weights"


def test_two_samples_are_taken_at_least_where_there_are_so_many():
    sizes = []

    def loss(model, batch):
        sizes.append(len(batch))
        return squares(model, batch)

    run(torch.nn.Linear(4, 1), loss, size=1, repeats=0)
    run(torch.nn.Linear(4, 1), loss, size=99, repeats=0)
    assert sizes == [2, 16]


@pytest.mark.parametrize(
    ("loss", "counted"),
    [(squares, False), (lambda model, batch: (squares(model, batch), 3), True)],
)
def test_it_tells_whose_denominator_counts(loss, counted):
    assert run(torch.nn.Linear(4, 1), loss).counted is counted


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch), "shape"),
        (lambda model, batch: None, "NoneType"),
        (lambda model, batch: 1.0, "no gradient"),
        (lambda model, batch: model(batch).mean().detach(), "no gradient"),
        (lambda model, batch: torch.ones((), requires_grad=True), "no parameter of the model"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(loss, said):
    with pytest.raises(LossError, match=said):
        run(torch.nn.Linear(4, 3), loss)


def test_a_lazy_module_is_refused_with_what_to_do():
    with pytest.raises(TaskError, match=r"weight, bias have no shape yet.*inside model="):
        run(torch.nn.LazyLinear(3))


@pytest.mark.parametrize(
    "model", [torch.nn.ReLU(), torch.nn.Linear(4, 1).requires_grad_(False)], ids=repr
)
def test_a_model_without_anything_to_train_is_refused(model):
    with pytest.raises(TaskError, match="nothing to train"):
        run(model)
