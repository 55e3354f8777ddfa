import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hetkit.worker.ema import WeightAverage


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return model.double()


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))


def test_it_is_that_of_pytorch():
    model = make_model()
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = WeightAverage(model, 0.9)
    for _ in range(5):
        change(model)
        average.update()
        reference.update_parameters(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with average.in_place():
        for mine, its in zip(model.parameters(), reference.module.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-14, atol=0)
        for mine, its in zip(model.buffers(), reference.module.buffers(), strict=True):
            assert torch.equal(mine, its), "buffers are the model's own"
    assert all(torch.equal(model.state_dict()[name], old) for name, old in before.items())


def test_the_trained_weights_come_back_when_the_block_fails():
    model = make_model()
    average = WeightAverage(model, 0.9)
    average.update()
    change(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError), average.in_place():
        raise KeyError
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_one_update_for_many_steps_keeps_the_horizon():
    """With local steps the weights are known at the synchronisations only."""
    model = make_model()
    each, once = WeightAverage(model, 0.9), WeightAverage(model, 0.9)
    for average in (each, once):
        average.update()
    change(model)
    for _ in range(3):
        each.update()
    once.update(steps=3)
    pairs = zip(*(a.state_dict()["parameters"].values() for a in (each, once)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def test_a_checkpoint_goes_on_and_without_one_it_begins_anew():
    model = make_model()
    first, second, third = (WeightAverage(model, 0.5) for _ in range(3))
    first.update()
    second.load_state_dict(first.state_dict())
    third.load_state_dict(None)
    change(model)
    for average in (first, second, third):
        average.update()
    a, b, c = (average.state_dict()["parameters"]["0.weight"] for average in (first, second, third))
    assert torch.equal(a, b)
    assert torch.equal(c, model[0].weight)
