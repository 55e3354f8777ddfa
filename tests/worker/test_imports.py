import sys

import pytest
import torch

from hetkit.worker.imports import ONCE, preload


@pytest.fixture(autouse=True)
def _no_frozen_garbage(monkeypatch):
    monkeypatch.setattr("hetkit.worker.imports.gc.freeze", lambda: None)


def test_installed_modules_are_imported_and_others_left_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hetkit_local_module.py").write_text("")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    preload(("colorsys", "hetkit_local_module", "no_such_module", "", "torch"))
    assert "colorsys" in sys.modules
    assert "hetkit_local_module" not in sys.modules


def test_a_module_that_cannot_be_imported_is_told_and_stops_nothing(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr("hetkit.worker.imports.import_module", _fail)
    preload(("colorsys",))
    assert "colorsys could not be preloaded" in caplog.text
    assert "a broken install" in caplog.text


def _fail(name):
    raise ImportError("a broken install")


def test_a_module_that_initialises_the_gpu_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SystemExit, match="leave it out of preload"):
        preload(("colorsys",))


def test_the_default_entry_is_imported_once():
    assert "hetkit.worker.rank" in ONCE
