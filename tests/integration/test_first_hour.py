"""What a newcomer ran into in the first hour, each as the story it was."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import hetkit as hk

LIMIT_S = 60.0
DATA = torch.arange(64.0).reshape(16, 4) / 64


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def make_task(**given: object) -> hk.Task:
    parts = {"model": lambda: nn.Linear(4, 1), "data": DATA, "loss": loss}
    parts["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return hk.Task(**{**parts, **given})


def make_fleet() -> hk.Fleet:
    return hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=0.005)


def await_step(session: hk.Session, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while session.progress.step < step:
        assert session.error is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_may_follow_a_stop_at_once():
    """stop() returned before the last grant had run out, and run() then said: stop() first."""
    with hk.Session(make_task(), devices=make_fleet(), global_batch=4) as session:
        session.run(epochs=50)
        await_step(session, 2)
        session.stop()
        session.run(epochs=1)
        session.wait(LIMIT_S)
        assert session.error is None
        assert session.progress.step % 4 == 0
        assert session.ledger[-1].last_step == session.progress.step - 1


def test_progress_after_a_stop_does_not_claim_to_be_complete():
    """A run that was stopped in its second epoch of fifty showed 100 %."""
    with hk.Session(make_task(), devices=make_fleet(), global_batch=4) as session:
        session.run(epochs=50)
        await_step(session, 2)
        session.stop()
        session.wait(LIMIT_S)
        assert session.progress.epochs_target == 50
        assert session.progress.done < 0.9


def test_the_session_of_a_cell_that_was_run_again_can_be_found_and_closed():
    """The name `session` was the new one's by then, and the old one kept its devices."""
    fleet = make_fleet()
    session = hk.Session(make_task(), devices=fleet, global_batch=4)
    session.run(epochs=50)
    old, session = session, hk.Session(make_task(), devices=fleet, global_batch=4)
    with pytest.raises(hk.DeviceBusyError, match=r"hk\.sessions\(\)"):
        session.run()
    assert hk.sessions() == [old, session]
    for each in hk.sessions()[:-1]:
        each.close()
    session.run()
    session.wait(LIMIT_S)
    session.close()
    assert hk.sessions() == []


def test_a_loaded_checkpoint_gives_its_model_without_training(tmp_path: Path):
    """Loading a checkpoint to evaluate it said: run() first."""
    with hk.Session(make_task(), devices=make_fleet(), global_batch=4) as session:
        session.run()
        session.wait(LIMIT_S)
        path = session.save(tmp_path / "run.ckpt")
        trained = session.model().state_dict()
    with hk.Session.load(path, make_task(), devices="cpu") as loaded:
        state = loaded.model().state_dict()
        assert all(torch.equal(state[name], trained[name]) for name in trained)
        loaded.save(tmp_path / "again.ckpt")


def test_an_exception_says_in_which_file_and_line_it_was_raised():
    """cloudpickle calls every function's file "<dynamic-code>"."""

    def bad(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with hk.Session(make_task(loss=bad), devices="cpu", global_batch=4) as session:
        session.run()
        with pytest.raises(KeyError) as caught:
            session.wait(LIMIT_S)
    told = "\n".join(caught.value.__notes__)
    assert __file__ in told
    assert 'raise KeyError("mine")' in told


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_criterion_of_pytorch_as_the_loss_is_explained(criterion: object):
    """Torch's own message was about an argument that the user never gave."""
    with pytest.raises(hk.TaskError, match=r"gets \(model, batch\)"):
        make_task(loss=criterion)
