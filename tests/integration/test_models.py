"""Models whose ranks must act together inside a step: what works, and what is refused, by name."""

from typing import Any

import numpy as np
import pytest
import torch

import hetkit as hk
from hetkit.errors import LossError

WAIT_S = 60.0


class Normed(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )


def train(session: hk.Session, epochs: int = 1) -> None:
    session.run(epochs=epochs)
    session.wait(WAIT_S)


def buffers(worker: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in worker.model.named_buffers()}


def test_batchnorm_stays_bit_equal_within_an_epoch_and_comes_back_as_pytorchs_own(
    make_session, make_task, reach
):
    session = make_session(make_task(model=Normed), batches=[14, 2])
    session.step(3)  # of the epoch's four
    reach(session, "paused")
    first, second = session.call(buffers)
    for name, buffer in first.items():
        assert torch.equal(buffer, second[name]), name
    model = session.model()
    assert type(model[1]) is torch.nn.BatchNorm1d
    assert torch.equal(model[1].running_var, first["1.running_var"])
    assert model[1].num_batches_tracked == 3
    returned = session.call(lambda worker: worker.model, ranks=[1])[0]
    assert isinstance(returned[1], torch.nn.BatchNorm1d)


def test_batchnorm_can_be_left_to_each_device(make_session, make_task, reach):
    session = make_session(make_task(model=Normed, sync_batchnorm=False), batches=[14, 2])
    session.step(3)
    reach(session, "paused")
    first, second = session.call(buffers)
    assert not torch.allclose(first["1.running_var"], second["1.running_var"])


def test_batchnorm_that_looks_across_the_devices_in_mid_step_is_waiting_and_no_computing(make_task):
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 4.0}, sample_s=2e-3)
    with hk.Session(
        make_task(model=Normed), devices=fleet, global_batch=16, batches="even"
    ) as session:
        train(session, epochs=2)
        fast, slow = (
            np.median(session.history.series("compute_s", rank=rank)[1]) for rank in (0, 1)
        )
        assert fast < 0.6 * slow, "the fast one's time in the slow one's layers counts as compute"
        waited = np.median(session.history.series("wait_s", rank=0)[1])
        assert waited > 0.3 * slow


def test_batchnorm_and_local_steps_and_an_average_of_the_weights_go_together(
    make_session, make_task
):
    session = make_session(make_task(model=Normed, ema=0.9), sync_every=3, batches=[16, 0])
    train(session)
    session.set(sync_every=1, batches=[5, 11])
    train(session)
    first, second = session.call(buffers)
    assert all(torch.equal(buffer, second[name]) for name, buffer in first.items())


@pytest.mark.parametrize("devices", ["inline", "cpu*2"])
def test_pytorchs_own_synchronised_batchnorm_works_without_a_gpu(make_session, make_task, devices):
    def model() -> torch.nn.Module:
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(Normed())

    session = make_session(make_task(model=model), devices=devices)
    train(session)
    assert session.ledger[-1].loss > 0


def test_a_loss_that_runs_the_layers_for_some_batches_only_is_refused_by_name(
    make_session, make_task
):
    def loss(model: Any, batch: Any) -> Any:
        if len(batch[0]) == 5:
            return torch.zeros(()), 0
        return (model(batch[0]) - batch[1]).square().mean(), len(batch[0])

    session = make_session(make_task(model=Normed, loss=loss), batches=[11, 5])
    session.run(epochs=1)
    with pytest.raises(LossError, match=r"BatchNorm layers ran 0 times .*sync_batchnorm=False"):
        session.wait(WAIT_S)


# ── parameters that only some batches use ──


class Gated(torch.nn.Module):
    """Its second part sees the samples that are far from zero, where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, far = self.near(x), x.norm(dim=1) > LIMIT
        return out.index_put((far.nonzero().flatten(),), self.far(x[far])) if far.any() else out


LIMIT = 2.6
"""Few of the samples are beyond it; the first two are made so."""


@pytest.fixture
def gated_task(make_task, numbers):
    inputs, targets = numbers
    inputs = inputs.clone()
    inputs[:2] = 3.0
    return lambda **parts: make_task(model=Gated, data=(inputs, targets), **parts)


def test_where_use_varies_unexpectedly_the_parameters_and_the_remedy_are_named(
    make_session, gated_task
):
    session = make_session(gated_task(), batches=[14, 2])
    session.run(epochs=3)
    with pytest.raises(
        LossError, match=r"far\.weight, far\.bias.*find_unused_parameters=True"
    ) as caught:
        session.wait(WAIT_S)
    assert "rank" in str(caught.value)


@pytest.mark.parametrize("batches", [[14, 2], [0, 16]])
def test_where_use_may_vary_it_trains(make_session, gated_task, batches):
    session = make_session(gated_task(find_unused_parameters=True), batches=batches)
    train(session, epochs=2)
    weights = session.call(lambda worker: worker.model.far.weight.detach())
    assert torch.equal(*weights)
    assert [session.output.tail(rank) for rank in (0, 1)] == ["", ""], "DDP has nothing to say"


def test_a_rank_without_samples_takes_part_with_a_sparse_table(make_session, make_task):
    def model() -> torch.nn.Module:
        return torch.nn.Embedding(10, 1, sparse=True)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model((batch[0][:, 0].abs() * 3).long().clamp(max=9)) - batch[1]).square().mean()

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    session = make_session(make_task(model=model, loss=loss, optimizer=sgd), batches=[0, 16])
    train(session)
    weights = session.call(lambda worker: worker.model.weight.detach())
    assert torch.equal(*weights)
