"""Code that is edited while the session lives: a local module reloaded, a class defined again."""

import importlib
import os
import signal
import sys

import pytest
import torch

LIMIT_S = 60.0


@pytest.fixture
def local_module(tmp_path, monkeypatch):
    """A module beside the notebook, and a way to edit and reload it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "beside_the_notebook.py"
    path.write_text("FACTOR = 1.0\n\ndef scaled(x):\n    return FACTOR * x\n")
    importlib.invalidate_caches()
    module = importlib.import_module("beside_the_notebook")

    def edit(text):
        path.write_text(text)
        importlib.invalidate_caches()
        importlib.reload(module)

    yield module, edit
    del sys.modules["beside_the_notebook"]


def test_an_edited_and_reloaded_module_reaches_the_next_run_and_the_state_stays(
    make_session, make_task, local_module, pids, places, reach
):
    module, edit = local_module

    def loss(model, batch):
        return module.scaled((model(batch[0]) - batch[1]).square().mean())

    session = make_session(make_task(loss=loss))
    session.step(6)
    reach(session, "paused")
    session.stop()
    reach(session, "ready")
    assert places(session) == [(1, 6)] * 2
    workers = pids(session)
    before = session.history.latest.loss
    edit("def scaled(x):\n    return 1000.0 + x\n")
    session.run(1)
    session.wait(LIMIT_S)
    assert 1000.0 < session.history.latest.loss < 1000.0 + 2 * before + 1
    assert not set(workers) & set(pids(session)), "the old code's workers went on"
    steps, _ = session.history.series("step_s")
    assert steps.tolist() == list(range(8))
    assert [(row.first_step, row.last_step) for row in session.ledger] == [(0, 3), (4, 7)]


def test_fresh_workers_recover_from_the_state_they_began_with(
    make_session, make_task, local_module, pids, reach
):
    """That state's file was once removed by the next model()."""
    module, edit = local_module

    def loss(model, batch):
        return module.scaled((model(batch[0]) - batch[1]).square().mean())

    session = make_session(make_task(loss=loss))
    session.run(1)
    session.wait(LIMIT_S)
    edit("def scaled(x):\n    return 1.0 * x + 0.0\n")
    session.step(2)
    reach(session, "paused")
    session.model()
    os.kill(pids(session)[0], signal.SIGKILL)
    session.resume()
    session.wait(LIMIT_S)
    assert [(row.first_step, row.last_step) for row in session.ledger] == [(0, 3), (4, 7)]


def test_unchanged_code_keeps_its_workers_warm(make_session, local_module, make_task, pids):
    module, _ = local_module

    def loss(model, batch):
        return module.scaled((model(batch[0]) - batch[1]).abs().mean())

    session = make_session(make_task(loss=loss))
    session.run(1)
    session.wait(LIMIT_S)
    workers = pids(session)
    for _ in range(3):
        session.run(1)
        session.wait(LIMIT_S)
    assert pids(session) == workers


def test_a_class_defined_again_is_the_new_one_in_a_new_session(make_session, make_task):
    def net(out):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 1, bias=out)

            def forward(self, x):
                return self.layer(x)

        return Net

    for bias, count in ((True, 4), (False, 3)):
        session = make_session(make_task(model=net(bias)))
        session.run(1)
        session.wait(LIMIT_S)
        assert sum(p.numel() for p in session.model().parameters()) == count
        session.close()
