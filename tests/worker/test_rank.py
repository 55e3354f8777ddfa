"""A rank obeys its messages in order, and says whose fault its end is."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hetkit as hk

WAIT_S = 60.0


class Normed(torch.nn.Module):
    """Has statistics, which a rank without samples must not touch, and an oddly stored buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 1)
        self.register_buffer("mask", torch.arange(6).reshape(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


def make_task(**given: Any) -> hk.Task:
    data = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return hk.Task(
        **{
            "model": Normed,
            "data": data,
            "loss": lambda model, batch: F.mse_loss(model(batch)[:, 0], batch.sum(1)),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            **given,
        }
    )


def counted(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.mse_loss(model(batch)[:, 0], batch.sum(1)), len(batch)


@pytest.mark.parametrize("loss", [None, counted], ids=["mean", "counted"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_death_in_any_step_is_nobodys_error(loss, at):
    fleet = hk.emulate("1xA100 + 1xV100", sample_s=1e-4, pace={"A100": 2.0}, dies_at={"V100": at})
    task = make_task(**({"loss": loss} if loss else {}))
    with hk.Session(task, devices=fleet, global_batch=16) as session:
        session.run(epochs=1)
        session.wait(WAIT_S)
        assert session.progress.step == 5
        kinds = [event.kind for event in session.history.events]
        assert kinds.count("failure") == kinds.count("recovery") == 1
        told = session.ledger[0].events
        failure, recovery = [text for text in told if "died" in text or "goes on from" in text]
        assert "rank 1 (V100 #1) died" in failure
        assert "goes on from step 0" in recovery


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_without_samples_runs_nothing_of_the_users_and_statistics_are_shared(idle):
    split = [0, 16] if idle == 0 else [16, 0]
    with hk.Session(make_task(), devices="cpu*2", global_batch=16, batches=split) as session:
        session.run(epochs=1)
        session.wait(WAIT_S)
        states = session.call(lambda worker: worker.model.state_dict())
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), name
        assert states[0]["norm.num_batches_tracked"] == 5
        assert states[0]["mask"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_users_error_arrives_as_itself_with_its_rank():
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 5:
            raise KeyError("no such label")
        return model(batch).mean()

    with hk.Session(
        make_task(loss=loss), devices="cpu*2", global_batch=16, batches=[11, 5]
    ) as session:
        session.run(epochs=1)
        with pytest.raises(KeyError, match="no such label") as caught:
            session.wait(WAIT_S)
        assert any("rank 1" in note for note in caught.value.__notes__)


def test_a_loss_that_gives_a_count_only_sometimes_is_refused():
    def loss(model: Any, batch: torch.Tensor) -> Any:
        mean = model(batch).mean()
        return (mean, 3) if len(batch) == 7 else mean

    with (
        hk.Session(make_task(loss=loss), devices="inline", global_batch=7) as session,
        pytest.raises(hk.HetkitError, match="some batches only"),
    ):
        session.run(epochs=1)


@pytest.mark.parametrize(("sample_s", "told"), [(1e-9, True), (3e-2, False)])
def test_a_device_that_this_machine_cannot_keep_up_with_is_told_once(sample_s, told):
    fleet = hk.emulate("1xA100", sample_s=sample_s)
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    with hk.Session(make_task(data=data), devices=fleet, global_batch=8) as session:
        session.run(epochs=2)
        session.wait(WAIT_S)
        notices = [event.text for event in session.history.events if event.kind == "notice"]
        assert len(notices) == told
        assert all("A100 #0" in text and "time_scale" in text for text in notices)


def test_a_loss_that_is_not_finite_in_the_first_step_says_so():
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean() * float("nan")

    with hk.Session(make_task(loss=loss), devices="cpu*2", global_batch=16) as session:
        session.run(epochs=1)
        with pytest.raises(hk.HetkitError, match="very first step"):
            session.wait(WAIT_S)
