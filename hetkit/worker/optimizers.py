"""The task's optimizer, made over the model's parameters or over groups of them."""

from collections.abc import Iterable
from typing import Any

import torch

from hetkit.errors import TaskError
from hetkit.task import Task


def make_optimizer(task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the task's optimizer for ``model``.

    Raises:
        TaskError: It is no ``torch.optim.Optimizer``, or it holds something that is no parameter
            of the model: no gradient of that would be exchanged, and the ranks would part.
    """
    optimizer = task.optimizer(parameter_groups(task, model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"optimizer(parameters) returned {type(optimizer).__name__}, not a "
            "torch.optim.Optimizer."
        )
    known = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in held if id(p) not in known]
    if strangers:
        raise TaskError(
            f"the optimizer holds {len(strangers)} tensors that are no parameters of the model "
            f"(of shape {', '.join(map(str, strangers[:3]))}): build it from what it is given, "
            "and make everything that is trained a parameter of the model."
        )
    return optimizer


def parameter_groups(task: Task, model: torch.nn.Module) -> Any:
    """Returns what the task's optimizer is given: all parameters, or the task's own groups."""
    return model.parameters() if task.parameters is None else task.parameters(model)


def on_copies(groups: Iterable[Any], copies: dict[torch.Tensor, torch.Tensor]) -> list[Any]:
    """Returns parameter groups, in any form that PyTorch takes, with copies in place of tensors.

    Args:
        groups: Parameters, ``(name, parameter)`` pairs, or dicts of them under ``"params"``.
        copies: Parameter to its copy; parameters without one are left out.
    """
    replaced: list[Any] = []
    for each in groups:
        if isinstance(each, torch.Tensor):
            replaced += [copies[each]] if each in copies else []
        elif isinstance(each, dict):
            inside = each["params"]
            inside = [inside] if isinstance(inside, torch.Tensor) else inside
            replaced.append({**each, "params": on_copies(inside, copies)})
        else:
            name, parameter = each
            replaced += [(name, copies[parameter])] if parameter in copies else []
    return replaced
