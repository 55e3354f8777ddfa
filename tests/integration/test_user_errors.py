"""A user's mistakes: each arrives as itself, says where it was made, and ends nothing for good."""

import ctypes
import os
import sys
import threading

import numpy as np
import pytest
import torch

import hetkit as hk

LIMIT_S = 60.0


class LossWentWrongError(Exception):
    """Has an ``__init__`` that pickle's own way back does not fit."""

    def __init__(self, step, *, why):
        super().__init__(f"at {step}: {why}")
        self.why = why


def plain_loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def failing_loss(fail, *, calls=4, ranks=(0, 1)):
    """Calls ``fail`` in the rank's n-th loss: two passes are the probe's, the rest are steps."""
    seen = []

    def loss(model, batch):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
        if rank is not None:
            seen.append(rank)
        if rank in ranks and len(seen) == calls:
            fail()
        return (model(batch[0]) - batch[1]).square().mean()

    return loss


def raise_it():
    raise LossWentWrongError(3, why="the sensor was off")


def failed(session, epochs=2):
    """Runs a session that is to fail, and returns what wait() raises."""
    session.run(epochs)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
        session.wait(LIMIT_S)
    assert session.state == "failed"
    assert session.error is caught.value
    return caught.value


def notes(error):
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_an_exception_in_the_loss_arrives_as_itself_and_training_goes_on_after(
    make_session, make_task, ranks, tmp_path
):
    """The others' lost connections must never be taken for the cause; afterwards run() works."""
    mended = tmp_path / "mended"

    def fail():
        if not mended.exists():
            raise_it()

    session = make_session(make_task(loss=failing_loss(fail, calls=7, ranks=ranks)))
    error = failed(session)
    assert type(error) is LossWentWrongError
    assert error.why == "the sensor was off"
    said = notes(error)
    assert f"on rank {ranks[0]}" in said or len(ranks) == 2
    assert "step 6" in said
    assert "in raise_it" in said, "the worker's own traceback is missing"
    assert any(event.kind == "failure" for event in session.history.events)
    mended.touch()
    session.run(2)
    session.wait(LIMIT_S)
    assert session.error is None
    steps, _ = session.history.series("step_s")
    assert steps.tolist() == list(range(12))
    rows = [(row.epoch, row.first_step, row.last_step) for row in session.ledger]
    assert rows == [(0, 0, 3), (1, 4, 7), (2, 8, 11)]


def test_an_exception_in_the_first_epoch_starts_from_the_beginning_again(
    make_session, make_task, weights, tmp_path
):
    """Fresh workers, from scratch: the failed attempt must leave no trace in the result."""
    mended = tmp_path / "mended"

    def fail():
        if not mended.exists():
            raise_it()

    session = make_session(make_task(loss=failing_loss(fail, calls=3, ranks=(1,))))
    failed(session)
    mended.touch()
    session.run(1)
    session.wait(LIMIT_S)
    steps, _ = session.history.series("step_s")
    assert steps.tolist() == [0, 1, 2, 3]
    assert [(row.first_step, row.last_step) for row in session.ledger] == [(0, 3)]
    undisturbed = make_session(devices=hk.emulate("2xV100", sample_s=1e-5), batches=[10, 6])
    undisturbed.run(1)
    undisturbed.wait(LIMIT_S)
    assert torch.equal(weights(session), weights(undisturbed))


class BrokenModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        raise LossWentWrongError(0, why="no such layer")


def test_an_exception_in_the_models_constructor_names_the_build(make_session, make_task):
    error = failed(make_session(make_task(model=BrokenModel)))
    assert type(error) is LossWentWrongError
    assert "while it was built" in notes(error)


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "collate", "metrics", "data"])
def test_an_exception_in_any_part_of_the_task_arrives_as_itself(
    make_session, make_task, numbers, part
):
    def broken(*arguments):
        raise LossWentWrongError(0, why=f"in the {part}")

    parts = {part: {"broken": broken} if part == "metrics" else broken, "validate": numbers}
    error = failed(make_session(make_task(**parts)))
    assert type(error) is LossWentWrongError
    assert error.why == f"in the {part}"
    assert "in broken" in notes(error)


def test_a_device_whose_memory_holds_not_even_one_sample_says_so(make_session):
    fleet = hk.emulate("A100 + V100", sample_s=1e-4, memory={"A100": "16GB", "V100": 64})
    error = failed(make_session(devices=fleet, batches=[10, 6]))
    assert type(error) is hk.PlanError
    assert "not even one sample fits" in str(error)
    assert notes(error) == "on rank 1 (V100 #1)"


class BrokenData(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 50:
            raise KeyError("image 50 is missing")
        return torch.ones(3), torch.ones(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_in_the_dataset_arrives_from_its_loader_processes(
    make_session, make_task, num_workers
):
    error = failed(make_session(make_task(data=BrokenData(), num_workers=num_workers)))
    assert type(error) is KeyError
    assert "image 50 is missing" in str(error)
    assert "__getitem__" in notes(error)


def test_leaving_by_sys_exit_is_a_failure_that_does_not_end_the_kernel(make_session, make_task):
    error = failed(make_session(make_task(loss=failing_loss(lambda: sys.exit("enough")))))
    assert type(error) is hk.RemoteError
    assert "SystemExit: enough" in str(error)


def test_an_exception_whose_text_cannot_be_had_is_still_told(make_session, make_task):
    """A text that has no wire form once made a death of the failure."""

    class UntellableError(Exception):
        def __str__(self):
            raise RuntimeError

    def fail():
        raise UntellableError

    error = failed(make_session(make_task(loss=failing_loss(fail))))
    assert type(error) is hk.RemoteError
    assert "UntellableError: (its text cannot be had: RuntimeError)" in str(error)
    assert "in fail" in notes(error)


def test_an_exception_with_half_a_character_in_its_text_arrives(make_session, make_task):
    def fail():
        raise ValueError("half a character: \ud800")

    error = failed(make_session(make_task(loss=failing_loss(fail))))
    assert type(error) is ValueError


def test_an_exception_that_cannot_travel_is_told_in_words(make_session, make_task):
    def fail():
        error = ValueError("holds a lock")
        error.lock = threading.Lock()
        raise error

    error = failed(make_session(make_task(loss=failing_loss(fail))))
    assert "holds a lock" in str(error)
    assert "in fail" in notes(error)


def test_a_real_segmentation_fault_is_named_with_what_was_said_last(make_session, make_task):
    def fail():
        print("about to read from nowhere", flush=True)
        ctypes.string_at(0)

    session = make_session(make_task(loss=failing_loss(fail, calls=3, ranks=(1,))))
    error = failed(session)
    assert type(error) is hk.WorkerDied
    assert "rank 1 (V100 #1) died: SIGSEGV" in str(error)
    assert "about to read from nowhere" in str(error)
    assert "Fatal Python error: Segmentation fault" in str(error)


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_leaves_without_a_word_is_named_with_its_exit_code(
    make_session, make_task, code
):
    error = failed(make_session(make_task(model=lambda: os._exit(code))))
    assert type(error) is hk.WorkerDied
    assert f"exit code {code}" in str(error)


def unused_parameters():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Linear(3, 1)
            self.spare = torch.nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)

    return Net()


def test_parameters_without_a_gradient_are_named_and_training_goes_on(make_session, make_task):
    session = make_session(make_task(model=unused_parameters))
    session.run(2)
    session.wait(LIMIT_S)
    said = [e.text for e in session.history.events if "no gradient" in e.text]
    assert len(said) == 1
    assert "spare.weight, spare.bias" in said[0]
    assert len(session.ledger) == 2


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda model, batch: (model(batch[0]) - batch[1]).square(), "shape"),
        (lambda model, batch: plain_loss(model, batch).item(), "no gradient"),
        (lambda model, batch: plain_loss(model, batch).detach(), "no gradient"),
        (lambda model, batch: None, "NoneType"),
        (lambda model, batch: plain_loss(model, batch) * float("nan"), "nan in the very first"),
        (lambda model, batch: torch.ones((), requires_grad=True), "no parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_says_why(make_session, make_task, loss, says):
    error = failed(make_session(make_task(loss=loss)))
    assert type(error) is hk.LossError
    assert says in str(error)


def test_data_is_looked_at_before_anything_starts(make_task, fast):
    empty = torch.empty(0, 3), torch.empty(0, 1)
    with pytest.raises(hk.DataError, match="data has no samples"):
        hk.Session(make_task(data=empty), devices=fast)
    with pytest.raises(hk.DataError, match="data has no samples"):
        hk.Session(make_task(data=[]), devices=fast)
    with pytest.raises(hk.DataError, match="no samples"):
        hk.Session(make_task(validate=empty), devices=fast)
    uneven = np.zeros((8, 3)), np.zeros((7, 1))
    with pytest.raises(hk.DataError, match=r"differ in length: \[7, 8\]"):
        hk.Session(make_task(data=uneven), devices=fast)


def test_data_that_a_worker_opens_and_finds_empty_says_so(make_session, make_task):
    error = failed(make_session(make_task(data=lambda: torch.empty(0, 3))))
    assert type(error) is hk.DataError
    assert "no samples" in str(error)


def test_what_cannot_travel_is_named_before_anything_starts(make_task, fast):
    guard = threading.Lock()

    def loss(model, batch):
        with guard:
            return plain_loss(model, batch)

    with pytest.raises(hk.PayloadError, match=r"guard.*lock"):
        hk.Session(make_task(loss=loss), devices=fast)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"devices": "tpu:0"}, hk.DeviceError, "tpu"),
        ({"devices": ""}, hk.DeviceError, "device"),
        ({"devices": []}, hk.DeviceError, "at least one"),
        ({"devices": "cpu*0"}, hk.DeviceError, "0"),
        ({"devices": "cpu*4", "global_batch": 3}, hk.SettingsError, "smaller than the number"),
        ({"batches": [10, 5], "global_batch": 16}, hk.SettingsError, "sum to 15"),
        ({"batches": [16], "global_batch": 16}, hk.SettingsError, "1 values for 2 devices"),
        ({"compression": "zip"}, hk.SettingsError, "compression must be one of"),
        ({"speed": 3}, hk.SettingsError, "'speed' is not a setting"),
        ({"seed": -1}, hk.SettingsError, "seed must be"),
        ({"global_batch": 0}, hk.SettingsError, "at least 1"),
    ],
)
def test_arguments_out_of_their_range_raise_in_the_cell_that_gave_them(
    make_task, fast, arguments, kind, says
):
    with pytest.raises(kind, match=says):
        hk.Session(make_task(), **{"devices": fast, **arguments})


def test_a_thing_that_is_no_task_is_refused(fast):
    with pytest.raises(hk.SettingsError, match=r"must be a hetkit\.Task, not dict"):
        hk.Session({"model": None}, devices=fast)


def test_a_failing_call_raises_in_the_cell_and_training_goes_on(make_session, slow, reach):
    session = make_session(devices=slow)
    session.run(2)
    reach(session, "running")
    with pytest.raises(LossWentWrongError) as caught:
        session.call(lambda worker: raise_it(), ranks=[1])
    assert "on rank 1" in notes(caught.value)
    with pytest.raises(hk.PayloadError, match="lock"):
        session.call(lambda worker: threading.Lock(), ranks=[0])
    with pytest.raises(hk.SettingsError, match="no rank 2: ranks are 0 to 1"):
        session.call(print, ranks=[2])
    assert session.call(print, ranks=[]) == []
    session.wait(LIMIT_S)
    assert len(session.ledger) == 2


def test_what_the_workers_print_can_be_read(make_session, until):
    session = make_session()
    session.step(1)
    until(lambda: session.state == "paused")
    session.call(lambda worker: print(f"hello from {worker.rank}"))
    for rank in (0, 1):
        until(lambda rank=rank: f"hello from {rank}" in session.output.tail(rank))
