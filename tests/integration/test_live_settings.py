"""set(): what is changed while it trains takes effect when its field says so, and not before."""

import pytest

import hetkit as hk

LIMIT_S = 60.0


def rates(session):
    return session.call(lambda worker: worker.optimizer.param_groups[0]["lr"])


@pytest.fixture
def paused(make_session, reach):
    """A session that has done 2 of its first epoch's 4 steps."""
    session = make_session()
    session.step(2)
    reach(session, "paused")
    return session


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batches": [10, 7]}, "sum to 17"),
        ({"batches": [4, 4, 8]}, "3 values for 2 devices"),
        ({"amp": "fp8"}, "amp must be one of"),
        ({"amp": ["bf16", "bf16"]}, "does not compute in 'bf16'"),
        ({"amp": "off", "lr": -1.0}, "lr must be"),
        ({"global_batch": 1, "batches": "even"}, "smaller than the number of devices"),
        ({"global_batch": 32}, "sum to 16"),
        ({"pace": 2}, "'pace' is not a setting"),
    ],
)
def test_a_refused_input_changes_nothing(make_session, slow, reach, change, says):
    fleet = hk.emulate("A100 + V100", pace={"A100": 1.0}, sample_s=1e-3)
    session = make_session(devices=fleet, batches=[10, 6])
    session.run(epochs=2)
    reach(session, "running")
    before = session.settings
    with pytest.raises(hk.SettingsError, match=says):
        session.set(**change)
    assert session.settings is before
    session.wait(LIMIT_S)
    assert [row.changes for row in session.ledger] == [(), ()]
    assert [row.batches for row in session.ledger] == [(10, 6)] * 2


def test_a_split_takes_effect_at_the_next_grant_within_the_epoch(paused, reach):
    assert paused.plan.batches == (10, 6)
    paused.set(batches=[4, 12], micro_batch=5)
    assert paused.settings.batches == (4, 12)
    assert paused.plan.batches == (10, 6), "nothing was granted since"
    paused.step(1)
    reach(paused, "paused")
    assert paused.plan.first_step == 2
    assert paused.plan.batches == (4, 12)
    assert paused.plan.micro_batches == (5, 5)
    assert paused.applied == paused.settings
    _, batches = paused.history.series("batch", rank=1)
    assert batches.tolist() == [6, 6, 12]
    assert any("batches: [10, 6] → [4, 12]" in e.text for e in paused.history.events)


def test_what_touches_the_maths_waits_for_the_next_epoch(paused, reach):
    paused.set(
        amp="auto",
        compression="fp16",
        lr=0.01,
        clip_norm=1.0,
        bucket_bytes=4096,
        global_batch=32,
        batches="even",
    )
    paused.step(1)
    reach(paused, "paused")
    plan = paused.plan
    assert (plan.amp, plan.compression, plan.lr) == (("off", "off"), "none", None)
    assert (plan.global_batch, plan.clip_norm, plan.bucket_bytes) == (16, None, None)
    assert paused.applied.global_batch == 16
    assert rates(paused) == [0.05] * 2
    paused.resume()
    paused.wait(LIMIT_S)
    paused.step(1)
    reach(paused, "paused")
    plan = paused.plan
    assert (plan.first_step, plan.epoch_steps) == (4, 2)
    assert plan.amp == ("bf16", "fp16")
    assert (plan.compression, plan.lr) == ("fp16", 0.01)
    assert (plan.global_batch, plan.clip_norm, plan.bucket_bytes) == (32, 1.0, 4096)
    assert paused.applied == paused.settings
    assert rates(paused) == [0.01] * 2
    paused.resume()
    paused.wait(LIMIT_S)
    assert paused.ledger[0].changes == ()
    changes = "; ".join(paused.ledger[1].changes)
    for change in ("amp: off → auto", "compression: none → fp16", "lr: None → 0.01"):
        assert change in changes
    assert "global_batch: 16 → 32" in changes
    assert (paused.ledger[1].first_step, paused.ledger[1].last_step) == (4, 5)


def test_a_factor_multiplies_the_tasks_rate_and_none_gives_it_back(make_session, make_task):
    import torch

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    session = make_session(make_task(scheduler=schedule))
    for lr in (None, "x0.1", 0.3, None):
        session.set(lr=lr)
        session.run(1)
        session.wait(LIMIT_S)
    own = [0.05 * 0.5**epoch for epoch in range(4)]
    assert [row.lr for row in session.ledger] == pytest.approx([own[0], 0.1 * own[1], 0.3, own[3]])
    assert rates(session) == [pytest.approx(0.05 * 0.5**4)] * 2


def test_settings_that_are_the_same_are_no_change(make_session):
    session = make_session()
    session.run(1)
    session.wait(LIMIT_S)
    session.set(amp="off", batches=[10, 6])
    session.run(1)
    session.wait(LIMIT_S)
    assert session.ledger[1].changes == ()


def test_settings_can_be_changed_before_the_first_run(make_session):
    session = make_session()
    session.set(batches=[8, 8], compression="bf16")
    assert session.applied is None
    session.run(1)
    session.wait(LIMIT_S)
    assert session.ledger[0].batches == (8, 8)
    assert session.ledger[0].compression == "bf16"
