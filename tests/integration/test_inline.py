"""devices="inline": one rank in this very process, for breakpoints and prints."""

import os
import threading
import time

import pytest
import torch

import hetkit as hk

LIMIT_S = 60.0


def inline(make_session, task=None, **arguments):
    return make_session(task, **{"devices": "inline", "global_batch": 16, **arguments})


def test_prints_and_breakpoints_are_this_process(make_session, make_task, capsys):
    seen = []

    def loss(model, batch):
        print("in the loss")
        seen.append(os.getpid())
        return (model(batch[0]) - batch[1]).square().mean()

    session = inline(make_session, make_task(loss=loss))
    session.run(1)
    assert session.state == "ready"
    assert "in the loss" in capsys.readouterr().out
    assert session.call(lambda worker: os.getpid()) == [os.getpid()]
    session.wait(LIMIT_S)


def test_inline_and_processes_train_the_same(make_session, weights):
    one = inline(make_session)
    two = make_session(devices="cpu*2")
    for session in (one, two):
        session.run(3)
        session.wait(LIMIT_S)
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-5, atol=1e-6)
    for row, other in zip(one.ledger, two.ledger, strict=True):
        assert row.loss == pytest.approx(other.loss, rel=1e-5)


def test_an_exception_is_raised_by_run_and_the_next_run_goes_on(make_session, make_task, tmp_path):
    """Its traceback was once cut off, so that %debug found nothing."""

    def loss(model, batch):
        if (tmp_path / "broken").exists():
            raise ZeroDivisionError("mind the gap")
        return (model(batch[0]) - batch[1]).square().mean()

    session = inline(make_session, make_task(loss=loss))
    session.run(1)
    (tmp_path / "broken").touch()
    with pytest.raises(ZeroDivisionError, match="mind the gap") as caught:
        session.run(1)
    assert caught.traceback[-1].name == "loss", "a debugger would not find the place"
    assert session.state == "failed"
    with pytest.raises(ZeroDivisionError):
        session.wait(LIMIT_S)
    (tmp_path / "broken").unlink()
    session.run(1)
    assert [row.epoch for row in session.ledger] == [0, 1]


def test_a_pause_from_another_thread_gives_the_cell_back(make_session, until):
    session = inline(make_session)

    def press():
        until(lambda: session.state == "running" and session.progress.step > 2)
        session.pause()

    presser = threading.Thread(target=press)
    presser.start()
    session.run(epochs=2000)
    presser.join(LIMIT_S)
    assert session.state == "paused"
    assert session.call(lambda worker: worker.step) == [session.progress.step]
    session.step(3)
    assert session.state == "paused"
    session.stop()
    assert session.state == "ready"


def test_it_saves_and_gives_its_model(make_session, make_task, tmp_path, weights):
    session = inline(make_session)
    session.run(1)
    path = session.save(tmp_path / "one.ckpt")
    loaded = hk.Session.load(path, make_task(), devices="inline")
    session.run(1)
    loaded.run(1)
    assert torch.equal(weights(session), weights(loaded))
    loaded.close()


def test_it_never_forks_this_process(make_session, make_task, monkeypatch):
    """A DataLoader would fork the kernel: inline, the rank loads by itself."""

    def fork():
        raise AssertionError("the kernel was forked")

    monkeypatch.setattr(os, "fork", fork)
    session = inline(make_session, make_task(num_workers=2))
    session.run(1)
    assert len(session.ledger) == 1


def test_closing_takes_no_time(make_session):
    """It once waited four seconds for the end of a process that there is none of."""
    session = inline(make_session)
    session.run(1)
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < 2.0
