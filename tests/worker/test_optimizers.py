import pytest
import torch

import hetkit as hk
from hetkit.worker.optimizers import make_optimizer, on_copies, parameter_groups


def make_task(**parts) -> hk.Task:
    usual = {
        "model": torch.nn.Identity,
        "data": [0],
        "loss": lambda model, batch: None,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return hk.Task(**{**usual, **parts})


def body_and_head(model):
    return [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": model[1].parameters(), "weight_decay": 0.5},
    ]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def test_groups_are_what_the_optimizer_is_given():
    model = make_model()
    optimizer = make_optimizer(make_task(parameters=body_and_head), model)
    body, head = optimizer.param_groups
    assert (body["lr"], head["lr"], head["weight_decay"]) == (0.01, 0.1, 0.5)
    assert body["params"][0] is model[0].weight
    (all_of_them,) = make_optimizer(make_task(), model).param_groups
    assert len(all_of_them["params"]) == 4


def test_what_is_no_optimizer_or_holds_strange_tensors_is_refused():
    with pytest.raises(hk.HetkitError, match="returned list, not a torch"):
        make_optimizer(make_task(optimizer=list), make_model())
    stranger = torch.nn.Parameter(torch.zeros(7))
    task = make_task(optimizer=lambda p: torch.optim.SGD([*p, stranger], lr=0.1))
    with pytest.raises(hk.HetkitError, match=r"1 tensors .* no parameters .*\(7,\)"):
        make_optimizer(task, make_model())


def test_every_form_of_groups_can_be_put_on_copies():
    model = make_model()
    copies = {p: torch.nn.Parameter(p.detach().clone()) for p in model.parameters()}
    frozen = copies.pop(model[1].bias)
    for groups in (
        model.parameters(),
        model.named_parameters(),
        body_and_head(model),
        [{"params": model[0].weight}, {"params": [model[1].bias]}],
    ):
        optimizer = torch.optim.SGD(on_copies(groups, copies), lr=0.1)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held <= {id(copy) for copy in copies.values()}
        assert id(frozen) not in held
    named = parameter_groups(make_task(parameters=lambda m: m.named_parameters()), model)
    assert on_copies(named, copies)[0][0] == "0.weight"
