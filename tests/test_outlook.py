"""Tests of what a session foretells, with real processes on emulated devices."""

import pytest
import torch

import hetkit as hk
from hetkit.planning.comparison import WhatIf

LIMIT_S = 120.0
STEPS = 10


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_task(samples: int) -> hk.Task:
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(samples, 64, generator=draw), torch.arange(samples) % 10
    return hk.Task(
        model=make_model,
        data=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


def run(session: hk.Session, **changes) -> None:
    session.set(**changes)
    session.run(epochs=1)
    session.wait(LIMIT_S)


@pytest.fixture(scope="module")
def session():
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.0}, sample_s=0.004, link="2MB/s, 1ms")
    task = make_task(16 * STEPS)
    with hk.Session(task, devices=fleet, global_batch=16, batches="even", guard_every=0) as session:
        with pytest.raises(hk.SessionError, match=r"run\(\)"):
            session.what_if(compression="fp16")
        run(session)
        yield session


def test_a_codec_is_tried_and_told_without_changing_anything(session):
    before = session.settings
    found = session.what_if(compression="int8")
    assert isinstance(found, WhatIf)
    assert session.settings == before
    assert found.prediction.plan.compression == "int8"
    assert found.prediction.parts.transfer_s < found.now.transfer_s / 2
    assert found.break_even_bytes_per_s > 0
    assert "emulated" in str(found)
    assert found.prediction.low_s <= found.prediction.step_s <= found.prediction.high_s
    assert not any("not known" in note for note in found.prediction.notes)


def test_a_split_left_to_the_balancer_is_the_one_that_it_would_make(session):
    found = session.what_if(batches="auto")
    assert sum(found.prediction.plan.batches) == 16
    assert found.prediction.plan.batches[0] > found.prediction.plan.batches[1]
    assert found.gain > 0


def test_what_does_not_change_the_time_says_so(session):
    found = session.what_if(lr=0.5)
    assert found.prediction.parts == found.now
    assert any("lr does not change" in note for note in found.notes)
    clipped = session.what_if(clip_norm=1.0)
    assert any("clip_norm" in note for note in clipped.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 4},
        {"global_batch": 32},
        {"sync_every": 4},
        {"bucket_bytes": 10_000},
        {"amp": "fp16"},
        {"tf32": True},
        {"batches": [12, 4]},
        {"compression": "topk(ratio=0.01)", "compression_warmup": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_setting_can_be_asked_for(session, changes):
    found = session.what_if(**changes)
    assert found.prediction.step_s > 0
    assert found.changes
    assert found._repr_html_().startswith("<table>")


def test_a_wrong_setting_is_refused(session):
    with pytest.raises(hk.SettingsError, match="compression"):
        session.what_if(compression="zip")
    with pytest.raises(hk.SettingsError, match="not a setting"):
        session.what_if(speed=2)


def test_guidance_has_the_numbers_of_this_task(session):
    found = session.guidance()
    assert [worth.name for worth in found.worths] == ["V100"]
    assert found.worths[0].ratio == pytest.approx(2.0, rel=0.2)
    assert "emulated" in str(found)


def test_the_ledger_keeps_the_prediction_beside_what_came(session):
    session.what_if(compression="fp16")
    run(session, compression="fp16")
    row = session.ledger[-1]
    assert row.predicted_low_s <= row.predicted_step_s <= row.predicted_high_s
    assert row.prediction_error is not None
    assert session.ledger[0].predicted_step_s is None
    assert "forecast" in str(session.ledger)
    run(session, compression="none")


def test_one_rank_alone_predicts_without_an_exchange():
    with hk.Session(make_task(16 * STEPS), devices="inline", global_batch=16) as alone:
        run(alone)
        found = alone.what_if(global_batch=32)
        assert found.prediction.parts.transfer_s == 0
        assert not found.emulated


def train(worker) -> None:
    model = worker.wrap(make_model())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.randn(160, 64), torch.arange(160) % 10
    for _ in worker.epochs(1):
        for batch in worker.batches(torch.utils.data.TensorDataset(*data)):
            with worker.step():
                worker.backward(loss(model, batch), count=len(batch[0]))
    del optimizer


def test_a_loop_of_ones_own_is_predicted_without_trying_its_codecs():
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.0}, sample_s=0.002, link="5MB/s")
    with hk.Session(train, devices=fleet, global_batch=16, batches="even") as own:
        own.run()
        own.wait(LIMIT_S)
        assert own.what_if(batches=[12, 4]).prediction.step_s > 0
        found = own.what_if(compression="fp16")
        assert any("fp16" in note for note in found.notes)


def test_a_bucket_size_is_proposed_from_what_was_measured(session):
    proposal = session.propose_bucket_bytes()
    assert proposal.present.bucket_bytes == session.plan.bucket_bytes
    assert proposal.best in (*proposal.choices, proposal.present)
    assert proposal.best.exposed_s <= proposal.present.exposed_s
    assert {choice.bucket_bytes for choice in proposal.choices} > {None}


def test_one_device_has_no_bucket_size():
    with hk.Session(make_task(160), devices="cpu", global_batch=16) as alone:
        run(alone)
        with pytest.raises(hk.SessionError, match="exchanges nothing"):
            alone.propose_bucket_bytes()
