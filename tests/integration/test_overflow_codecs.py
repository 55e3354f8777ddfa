"""One forced overflow on one rank under every codec: skipped by all, and training goes on."""

import math
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.compression import COMPRESSIONS

LIMIT_S = 120.0
WIDTH = 160  # its square is above what codecs leave uncompressed
STEPS = 4


def poisoned() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """64 samples; the gradient of one of them overflows."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(64, 3, generator=generator)
    poison = torch.zeros(64, dtype=torch.bool)
    poison[20] = True
    return features, features.sum(1, keepdim=True), poison


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(3, WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, 1),
    )


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    features, targets, poison = batch
    outputs = model(features)
    if poison.any() and outputs.requires_grad:
        outputs.register_hook(lambda gradient: gradient * math.inf)
    return (outputs - targets).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)


def own_loop(worker: Any) -> None:
    model = worker.wrap(make_model())
    worker.optimizer(sgd(model.parameters()))
    for _ in worker.epochs(len(COMPRESSIONS) + 1):
        for batch in worker.batches(poisoned()):
            with worker.step():
                worker.backward(loss(model, batch), count=len(batch[0]))


def task() -> hk.Task:
    return hk.Task(model=make_model, data=poisoned(), loss=loss, optimizer=sgd)


def state(worker: Any) -> tuple[list[torch.Tensor], float | None]:
    return [p.detach().clone() for p in worker.model.parameters()], worker.codec.residual_norm()


@pytest.mark.parametrize("subject", [task, lambda: own_loop], ids=["task", "own loop"])
def test_an_overflow_on_one_rank_is_skipped_by_all_under_every_codec(subject, fast):
    with hk.Session(
        subject(),
        devices=fast,
        global_batch=16,
        batches=[10, 6],
        seed=3,
        compression=COMPRESSIONS[0],
        bucket_bytes=60_000,
    ) as session:
        losses = []
        for epoch, compression in enumerate(COMPRESSIONS):
            session.set(compression=compression)
            session.run(epochs=1)
            session.wait(LIMIT_S)
            row = session.ledger[-1]
            losses.append(row.loss)
            assert row.compression == compression
            _, skipped = session.history.series("skipped")
            assert sum(skipped[epoch * STEPS :]) == 1, f"{compression}: {skipped}"
            (first, waits), (second, waits_too) = session.call(state)
            assert all(map(torch.equal, first, second)), f"{compression}: replicas differ"
            assert all(each.isfinite().all() for each in first)
            assert all(norm is None or math.isfinite(norm) for norm in (waits, waits_too))
            if compression in ("topk", "threshold", "powersgd"):
                assert waits, f"{compression} keeps what it did not send"
        assert losses[-1] < losses[0]
