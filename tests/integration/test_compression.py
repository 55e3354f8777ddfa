"""Codecs in a session: their state over a restart, warm-up, the guard, and what is told."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.codec import Codec

LIMIT_S = 120.0
WIDTH = 160  # its square is above what codecs leave uncompressed
MANY_BUCKETS = 60_000
ROUNDING = 1e-6  # the largest weight is about 0.6


def make_task(optimizer: Callable[[Any], Any] | None = None) -> hk.Task:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(64, 3, generator=generator)
    return hk.Task(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(3, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, 1),
        ),
        data=(features, features.sum(1, keepdim=True)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=optimizer or (lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5)),
    )


def train(worker: Any) -> None:
    task = make_task()
    model = worker.wrap(task.model())
    worker.optimizer(task.optimizer(model.parameters()))
    for _ in worker.epochs(8):
        for batch in worker.batches(task.data):
            with worker.step():
                worker.backward(task.loss(model, batch), count=len(batch[0]))


@pytest.fixture
def start(fast: hk.Fleet) -> Iterator[Callable[..., hk.Session]]:
    made: list[hk.Session] = []

    def make(subject: Any = None, **given: Any) -> hk.Session:
        usual: dict[str, Any] = {"devices": fast, "global_batch": 16}
        if "devices" not in given:
            usual["batches"] = [10, 6]
        made.append(hk.Session(subject or make_task(), **{**usual, **given}))
        return made[-1]

    yield make
    for session in made:
        session.close()


def train_on(session: hk.Session, epochs: int) -> None:
    session.run(epochs=epochs)
    session.wait(LIMIT_S)


def notices(session: hk.Session, words: str) -> list[str]:
    return [event.text for event in session.history.events if words in event.text]


def parameters(session: hk.Session) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in session.model().parameters()])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def waiting(worker: Any) -> dict[str, torch.Tensor]:
    return dict(worker.codec.state_dict()["residuals"])


@pytest.mark.parametrize("bucket_bytes", [None, MANY_BUCKETS], ids=["one bucket", "several"])
@pytest.mark.parametrize("subject", [make_task, lambda: train], ids=["task", "own loop"])
def test_a_resumed_run_is_the_undisturbed_one(start, tmp_path, bucket_bytes, subject):
    """PowerSGD works on each matrix alone: buckets that DDP fills otherwise change its rounding."""
    settings = {"compression": "powersgd(rank=1)", "bucket_bytes": bucket_bytes, "seed": 5}
    whole = start(subject(), **settings)
    train_on(whole, 2)
    path = whole.save(tmp_path / "half.ckpt")
    residuals = whole.call(waiting)
    train_on(whole, 2)
    expected = parameters(whole)
    names = set(residuals[0])
    assert names == set(residuals[1])
    assert len(names) == 2, "one for each matrix that is compressed"
    whole.close()
    with hk.Session.load(path, subject(), devices=whole.devices) as resumed:
        train_on(resumed, 2)
        assert apart(parameters(resumed), expected) < ROUNDING


def test_a_state_saved_in_the_middle_of_an_epoch_is_whole_too(start, tmp_path, reach):
    session = start(compression="powersgd(rank=1)", seed=5)
    session.step(5)
    reach(session, "paused")
    path = session.save(tmp_path / "middle.ckpt")
    session.step(2)
    reach(session, "paused")
    expected = parameters(session)
    session.close()
    with hk.Session.load(path, make_task(), devices=session.devices) as resumed:
        resumed.step(2)
        reach(resumed, "paused")
        assert apart(parameters(resumed), expected) < ROUNDING


def without_codec(path: Any) -> None:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    inner = path.with_suffix(".pt")
    inner.write_bytes(members["state.pt"])
    state = torch.load(inner, weights_only=True)
    assert len(state["codec"]["ranks"]) == 2
    torch.save({**state, "codec": None}, inner)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("session.json", members["session.json"])
        archive.write(inner, "state.pt")


def test_without_what_waited_the_run_is_another(start, tmp_path):
    """So the test above sees residuals: they, and nothing else, are what is missing here."""
    whole = start(compression="powersgd(rank=1)", seed=5)
    train_on(whole, 2)
    path = whole.save(tmp_path / "half.ckpt")
    train_on(whole, 1)
    expected = parameters(whole)
    whole.close()
    without_codec(path)
    with hk.Session.load(path, make_task(), devices=whole.devices) as resumed:
        train_on(resumed, 1)
        assert apart(parameters(resumed), expected) > 100 * ROUNDING


def test_a_death_goes_back_to_the_residuals_of_the_last_epochs_end():
    fleet = {"sample_s": 1e-5, "pace": {"V100": 1.0}}
    found = []
    for dies_at in ({}, {"dies_at": {"V100 #1": 6}}):
        devices = hk.emulate("2xV100", **fleet, **dies_at)
        with hk.Session(
            make_task(),
            devices=devices,
            global_batch=16,
            batches=[10, 6],
            compression="powersgd(rank=1)",
        ) as session:
            train_on(session, 3)
            found.append(parameters(session))
            died = [event for event in session.history.events if event.kind == "recovery"]
            assert len(died) == bool(dies_at)
    assert apart(*found) < ROUNDING


def test_other_devices_take_what_waited_on_their_rank_and_the_rest_is_dropped(
    start, tmp_path, reach
):
    three = start(devices="cpu*3", batches=[6, 5, 5], compression="topk(ratio=0.01)")
    train_on(three, 2)
    path = three.save(tmp_path / "three.ckpt")
    before = three.call(lambda worker: worker.codec.residual_norm())
    three.close()
    with hk.Session.load(path, make_task(), devices="cpu*2") as two:
        two.step(1)
        reach(two, "paused")
        assert len(notices(two, "what waited in topk(ratio=0.01) on ranks 2 to 2 is dropped")) == 1
        # One step on, what waits is still mostly what waited.
        after = two.call(lambda worker: worker.codec.residual_norm())
        assert after == pytest.approx(before[:2], rel=0.5)


def test_changes_of_parameters_are_not_mixed_with_gradients(start):
    session = start(compression="topk(ratio=0.01)")
    train_on(session, 1)
    session.set(sync_every=2)
    train_on(session, 1)
    assert len(notices(session, "topk(ratio=0.01) is left: what waited")) == 1
    session.set(sync_every=1)
    train_on(session, 1)
    assert len(notices(session, "topk(ratio=0.01) is left: what waited")) == 2


def test_the_first_epochs_may_go_without_compression(start):
    session = start(compression="int8", compression_warmup=2)
    train_on(session, 4)
    assert [row.compression for row in session.ledger] == ["none", "none", "int8", "int8"]
    wire = [row.wire_bytes for row in session.ledger]
    assert wire[0] == wire[1] > 2 * wire[3]


def test_error_feedback_under_adam_is_warned_of_once_and_under_sgd_not(start):
    adam = start(make_task(lambda parameters: torch.optim.AdamW(parameters, 1e-3)))
    adam.set(compression="topk")
    train_on(adam, 1)
    adam.set(compression="none")
    train_on(adam, 1)
    adam.set(compression="topk")
    train_on(adam, 1)
    told = notices(adam, "AdamW is not linear in the gradient")
    assert len(told) == 1
    adam.close()
    sgd = start(compression="topk")
    train_on(sgd, 1)
    assert not notices(sgd, "not linear")


class Half(Codec):
    """Sends every other element, and loses the others: about half of the gradient's square."""

    name = "half"

    def exchange(self, bucket: Bucket, wire: Any) -> None:
        bucket.flat[::2] = 0
        wire.all_reduce(bucket.flat)

    def wire_bytes(self, pieces: Any, element_bytes: int, world_size: int) -> float:
        return 0.0


def test_a_codec_that_goes_astray_is_told_of_once(start):
    task = dataclasses.replace(make_task(), codecs={"half": Half})
    session = start(task, compression="task:half", guard_every=1)
    train_on(session, 3)
    assert len(notices(session, "its cosine to the true one")) == 1
    session.set(compression="int8")
    train_on(session, 1)
    assert len(notices(session, "its cosine to the true one")) == 1, "int8 is near the gradient"


def test_the_guard_looks_at_the_first_step_and_then_now_and_then(start):
    session = start(compression="int8", guard_every=6)
    train_on(session, 4)
    _, sent = session.history.series("wire_bytes", rank=0)
    looked = [step for step, each in enumerate(sent) if each > 2 * min(sent)]
    assert looked == [0, 6, 12], "the gradient travelled uncompressed too"
