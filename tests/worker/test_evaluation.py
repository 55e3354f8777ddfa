import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.records.book import combine
from hetkit.worker.data import open_samples
from hetkit.worker.evaluation import evaluate

CPU = torch.device("cpu")
SAMPLES = 53
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).double()


def squares(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def hits(model, batch):
    return float(((model(batch[0])[:, 0] > 0.5) == batch[1].bool()).double().mean())


def positives(model, batch):
    """A mean over the positive samples alone; NaN, with a count of 0, where there is none."""
    chosen = model(batch[0])[:, 0][batch[1].bool()]
    return chosen.mean(), len(chosen)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(),
        torch.nn.Linear(8, 1),
    ]
    return torch.nn.Sequential(*layers).double()


TASK = hk.Task(
    model=lambda: None,
    data=(X, Y),
    loss=squares,
    optimizer=torch.optim.SGD,
    validate=(X, Y),
    metrics={"accuracy": hits, "positives": positives},
)


@given(
    batches=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(sum),
    micro_batch=st.integers(1, 60),
)
def test_every_sample_counts_once_whatever_the_split(model, batches, micro_batch):
    samples = open_samples(TASK.validate, None)
    reports = [
        evaluate(
            TASK,
            model,
            samples,
            rank=rank,
            batches=tuple(batches),
            micro_batch=micro_batch,
            device=CPU,
        )[0]
        for rank in range(len(batches))
    ]
    assert sum(report["loss"][1] for report in reports) == SAMPLES
    model.eval()
    with torch.no_grad():
        expected = {
            "loss": float(squares(model, (X, Y))),
            "accuracy": hits(model, (X, Y)),
            "positives": float(positives(model, (X, Y))[0]),
        }
    assert combine(reports) == pytest.approx(expected, rel=1e-12)


def test_the_model_is_left_as_it_was(model):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = open_samples(TASK.validate, None)
    _, seconds = evaluate(TASK, model, samples, rank=0, batches=(1,), micro_batch=10, device=CPU)
    assert model.training
    assert seconds > 0
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model.eval()
    evaluate(TASK, model, samples, rank=0, batches=(1,), micro_batch=10, device=CPU)
    assert not model.training
