"""The task that the benchmarks share: an MLP on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hetkit as hk


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1,797 images of 64 pixels in 0 … 1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def make_task() -> hk.Task:
    return hk.Task(model=make_model, data=digits(), loss=loss, optimizer=make_optimizer)
