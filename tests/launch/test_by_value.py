import importlib
import importlib.metadata
import os
import sys
import threading

import cloudpickle
import pytest

from hetkit.launch import by_value
from hetkit.launch.by_value import edited_at, local_modules, pickled_by_value


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Imports modules that lie beside the notebook."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(name):
        (tmp_path / f"{name}.py").write_text("")
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("hetkit_beside"):
            del sys.modules[name]


def test_the_users_files_are_local_and_installed_ones_are_not(beside):
    module = beside("hetkit_beside")
    found = local_modules()
    assert found["hetkit_beside"] is module
    assert __name__ in found
    for name in ("os", "json", "torch", "numpy", "pytest", "hetkit", "hetkit.task", "__main__"):
        assert name not in found


def test_an_editable_install_is_left_to_the_worker_but_watched(beside, tmp_path, monkeypatch):
    beside("hetkit_beside_lab")
    assert "hetkit_beside_lab" in local_modules()
    info = tmp_path / "hetkit_beside_lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hetkit-beside.lab\nVersion: 1\n")
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda: [importlib.metadata.PathDistribution(info)]
    )
    monkeypatch.setattr(by_value, "_editable_packages", by_value._editable_packages.__wrapped__)
    assert "hetkit_beside_lab" not in local_modules()
    first = dict(edited_at(local_modules()))
    assert set(first) == {"hetkit_beside_lab"}
    os.utime(tmp_path / "hetkit_beside_lab.py", ns=(1, 1))
    assert edited_at(local_modules()) == (("hetkit_beside_lab", 1),)


def test_the_registry_is_left_as_it_was(beside):
    mine, theirs = beside("hetkit_beside_one"), beside("hetkit_beside_two")
    cloudpickle.register_pickle_by_value(theirs)
    try:
        with pickled_by_value({m.__name__: m for m in (mine, theirs)}):
            inside = cloudpickle.list_registry_pickle_by_value()
            assert inside == {"hetkit_beside_one", "hetkit_beside_two"}
        with pytest.raises(ZeroDivisionError), pickled_by_value({mine.__name__: mine}):
            raise ZeroDivisionError
        assert cloudpickle.list_registry_pickle_by_value() == {"hetkit_beside_two"}
    finally:
        cloudpickle.unregister_pickle_by_value(theirs)


def test_threads_do_not_take_each_others_modules_away(beside):
    module = beside("hetkit_beside")
    faults = []

    def pickle_often():
        for _ in range(200):
            with pickled_by_value({module.__name__: module}):
                if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                    faults.append("taken away")

    threads = [threading.Thread(target=pickle_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
