import pytest
import torch

from hetkit.worker.objective import Objective


class Mixed(torch.nn.Module):
    """Parameters of several types, one of them unused, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.single = torch.nn.Parameter(torch.ones(3))
        self.precise = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.unused = torch.nn.Parameter(torch.ones(1))

    def energy(self) -> torch.Tensor:
        return self.wave.abs().square().sum() + self.single.sum() + self.precise.sum()


@pytest.fixture
def model() -> Mixed:
    return Mixed()


@pytest.fixture
def objective(model: Mixed) -> Objective:
    def loss(model, batch):
        return model.energy() * batch, 5

    used = {name: p for name, p in model.named_parameters() if name != "unused"}
    return Objective(model, loss, used)


def test_the_loss_gets_the_users_own_model_and_may_return_a_pair(objective, model):
    (mean, count), anchor = objective(2.0)
    assert (mean.item(), count, anchor) == (14.0, 5, None)


def test_without_a_batch_every_used_parameter_gets_zeros_and_no_other_anything(objective, model):
    objective(None).returned.backward()
    for parameter in (model.single, model.precise, model.wave):
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert model.unused.grad is None


def test_the_zero_has_zero_gradients_even_where_weights_are_not_finite(objective, model):
    with torch.no_grad():
        model.single[0] = float("inf")
    objective(None).returned.backward()
    assert torch.equal(model.single.grad, torch.zeros(3))


def test_it_trains_the_models_parameters_and_no_others(objective, model):
    assert [id(p) for p in objective.parameters()] == [id(p) for p in model.parameters()]


def test_a_sparse_table_gets_a_sparse_zero():
    model = torch.nn.Embedding(3, 2, sparse=True)
    objective = Objective(model, lambda model, batch: model(batch).sum(), {"weight": model.weight})
    objective(None).returned.backward()
    assert model.weight.grad.is_sparse
    assert not model.weight.grad.to_dense().any()


def test_where_use_varies_nothing_gets_a_gradient_that_the_batch_gave_none(model):
    objective = Objective(
        model, lambda model, batch: model.single.sum(), {"single": model.single}, varying=True
    )
    for batch in (None, 1.0):
        returned, anchor = objective(batch)
        (returned + anchor).backward()
        assert [p.grad is None for p in model.parameters()] == [batch is None, True, True, True]


def test_it_names_the_used_parameters_that_a_loss_does_not_depend_on(objective, model):
    loss = model.single.sum() * 2
    loss.backward()
    assert objective.missing(loss) == ["precise", "wave"]
