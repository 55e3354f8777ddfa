"""Law 1 for every denominator: any split of any batch gives the gradient of one process.

Hypothesis chooses splits, micro-batches and global batches (so last batches too) while one session
of three ranks stays alive; the counts of the samples range from 0 to a million.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import hetkit as hk
from hetkit.worker.order import epoch_order

SEED = 4
SAMPLES = 46
LIMIT_S = 60.0


class RecordingSgd(torch.optim.SGD):
    """Keeps every gradient that it is given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: None = None) -> None:
        gradients = [p.grad.flatten() for p in self.param_groups[0]["params"]]
        self.seen.append(torch.cat(gradients).clone())
        super().step(closure)


def make_data() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    counts = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 500.0, 1e6], dtype=torch.float64)
    chosen = torch.randint(len(counts), (SAMPLES,), generator=generator)
    return features, labels, counts[chosen]


def errors(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean_loss(model: Any, batch: Any) -> torch.Tensor:
    return errors(model, batch).mean()


def counted_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count = batch[2].sum()
    return (errors(model, batch) * batch[2]).sum() / count, count  # 0 / 0 where all counts are 0


def sum_loss(model: Any, batch: Any) -> torch.Tensor:
    return errors(model, batch).sum()


def loss_of_terms(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two terms over the samples' counts, and one that does not look at the samples."""
    count = batch[2].sum()
    outputs = model(batch[0])
    first = F.cross_entropy(outputs, batch[1], reduction="none")
    second = outputs.square().sum(1)
    data_terms = ((first + 0.3 * second) * batch[2]).sum() / count
    return data_terms + 0.1 * model.weight.square().sum(), count


@dataclass(frozen=True)
class Kind:
    loss: Any
    reduction: str = "mean"


KINDS = {
    "mean": Kind(mean_loss),
    "counted": Kind(counted_loss),
    "sum": Kind(sum_loss, "sum"),
    "terms": Kind(loss_of_terms),
}


def take(worker: Any) -> dict[str, torch.Tensor]:
    worker.optimizer.seen.clear()
    return worker.model.state_dict()


def seen(worker: Any) -> torch.Tensor:
    return torch.stack(worker.optimizer.seen)


@pytest.fixture(scope="module", params=KINDS)
def running(request: pytest.FixtureRequest, _whole_run: Any) -> Any:
    kind = KINDS[request.param]
    RecordingSgd([torch.nn.Parameter(torch.ones(1))])  # PyTorch patches its class at the first use
    task = hk.Task(
        model=lambda: torch.nn.Linear(4, 3).double(),
        data=make_data(),
        loss=kind.loss,
        reduction=kind.reduction,
        optimizer=lambda parameters: RecordingSgd(list(parameters)),
    )
    with hk.Session(task, devices="cpu*3", global_batch=9, seed=SEED, batches="even") as session:
        session.run(1)
        session.wait(LIMIT_S)
        yield kind, session


def plain_gradients(
    kind: Kind, weights: dict[str, torch.Tensor], epoch: int, global_batch: int
) -> torch.Tensor:
    """The gradients of one plain process; zero where a step has nothing to count."""
    model = torch.nn.Linear(4, 3).double()
    model.load_state_dict(weights)
    optimizer = RecordingSgd(list(model.parameters()))
    order, data = epoch_order(SAMPLES, SEED, epoch), make_data()
    for start in range(0, SAMPLES, global_batch):
        batch = tuple(part[order[start : start + global_batch]] for part in data)
        returned = kind.loss(model, batch)
        optimizer.zero_grad()
        if isinstance(returned, tuple):
            mean, count = returned
            returned = mean if count else 0 * model.weight.sum() + 0 * model.bias.sum()
        returned.backward()
        optimizer.step()
    return torch.stack(optimizer.seen)


def splits() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(lambda b: sum(b) >= 3)


@settings(max_examples=20)
@given(batches=splits(), micro_batch=st.integers(1, 25))
@example(batches=[0, 0, 3], micro_batch=1)  # many steps whose samples all count 0
@example(batches=[20, 20, 20], micro_batch=7)  # more than there are samples
@example(batches=[1, 13, 1], micro_batch=25)  # a last step of one sample
def test_any_split_gives_the_gradient_of_one_process(
    running: Any, batches: list[int], micro_batch: int
) -> None:
    kind, session = running
    weights, epoch = session.call(take)[0], session.progress.epoch
    session.set(global_batch=sum(batches), batches=batches, micro_batch=micro_batch)
    session.run(1)
    session.wait(LIMIT_S)
    every = session.call(seen)
    expected = plain_gradients(kind, weights, epoch, sum(batches))
    assert all(torch.equal(each, every[0]) for each in every[1:])
    assert len(every[0]) == len(expected) == math.ceil(SAMPLES / sum(batches))
    distance = torch.linalg.vector_norm(every[0] - expected, dim=1)
    assert (distance <= 1e-12 * torch.linalg.vector_norm(expected, dim=1)).all()


def test_what_is_shown_of_a_sum_is_the_mean_over_the_samples() -> None:
    kinds = [KINDS["mean"], KINDS["sum"]]
    curves = []
    for kind in kinds:
        task = hk.Task(
            model=lambda: torch.nn.Linear(4, 3).double(),
            data=make_data(),
            validate=make_data(),
            loss=kind.loss,
            reduction=kind.reduction,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        )
        with hk.Session(
            task, devices="cpu*2", global_batch=20, seed=SEED, batches=[1.0, 3.0]
        ) as session:
            session.run(1)
            session.wait(LIMIT_S)
            losses = session.history.series("loss")[1].tolist()
            curves.append([*losses, session.ledger[0].metrics["loss"]])
    assert curves[0] == pytest.approx(curves[1], rel=1e-12)
