import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.worker.data import open_samples
from hetkit.worker.own.evaluation import measure_share


@given(
    samples=st.integers(1, 20),
    batches=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    largest=st.integers(1, 7),
)
def test_every_sample_counts_once_whatever_the_split(samples, batches, largest):
    values = torch.arange(samples, dtype=torch.float64)
    model = torch.nn.Linear(1, 1)
    pairs = [
        measure_share(
            [model],
            {"mean": lambda model, batch: batch.mean()},
            open_samples(values, None),
            rank=rank,
            batches=batches,
            largest=largest,
            device=torch.device("cpu"),
        )["mean"]
        for rank in range(len(batches))
    ]
    assert sum(count for _, count in pairs) == samples
    assert abs(sum(total for total, _ in pairs) - float(values.sum())) < 1e-9
    assert model.training


def test_models_are_in_eval_mode_meanwhile():
    model = torch.nn.Dropout()
    found = measure_share(
        [model],
        {"training": lambda model, batch: float(model.training)},
        open_samples(torch.ones(3), None),
        rank=0,
        batches=[1],
        largest=3,
        device=torch.device("cpu"),
    )
    assert found == {"training": (0.0, 3.0)}
    assert model.training
