import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hetkit as hk

HEAVY = (
    "torch",
    "IPython",
    "ipywidgets",
    "anywidget",
    "traitlets",
    "ipykernel",
    "plotly",
    "pandas",
)

PROBE = """
import json, sys, time
began = time.perf_counter()
import hetkit
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules), "home": hetkit.__file__}))
"""


def fresh(code: str) -> str:
    """What a fresh interpreter prints that runs ``code``."""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout


def loaded(code: str) -> set[str]:
    return set(json.loads(fresh(f"{code}; import sys, json; print(json.dumps([*sys.modules]))")))


def test_importing_loads_neither_torch_nor_jupyter(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(fresh(PROBE))
    with capsys.disabled():
        print(f"\nimport hetkit: {answer['seconds'] * 1e3:.0f} ms, to be below 300 ms")
    tops = {name.partition(".")[0] for name in answer["modules"]}
    assert not tops & set(HEAVY)
    assert not {top for top in tops if top.startswith("jupyter")}
    assert answer["seconds"] < 5, "a guard against a hang; the figure to reach is printed"


@pytest.mark.parametrize("name", hk.__all__)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(hk, name)
    assert name in dir(hk)
    assert callable(thing)
    assert (thing.__doc__ or "").strip()


def test_what_a_script_uses_loads_neither_torch_nor_jupyter() -> None:
    """Law 4: the kernel describes a task and devices without PyTorch, a script without Jupyter."""
    modules = loaded("import hetkit as hk; [getattr(hk, name) for name in hk.__all__]")
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("first", ["", "import hetkit.devices.fleet;", "hk.emulate('2xA100');"])
def test_devices_is_a_room_and_a_function(first: str) -> None:
    """``hk.devices()`` works whatever was imported before it."""
    assert "cpu" in fresh(f"import hetkit as hk; {first} print(hk.devices())")


def test_the_public_names_are_sorted_and_listed_once() -> None:
    assert hk.__all__ == sorted(set(hk.__all__))
    assert set(hk.__all__) <= set(dir(hk))
    assert hk.__version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hetkit' has no attribute 'nonsense'"):
        hk.nonsense  # noqa: B018


def test_a_star_import_brings_the_public_names() -> None:
    listed = fresh("from hetkit import *; print(*[n for n in dir() if n[0] != '_'])")
    assert set(listed.split()) == set(hk.__all__)


def test_a_torch_py_in_the_working_folder_is_not_run_by_importing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('this is not PyTorch')")
    subprocess.run(
        [sys.executable, "-c", "import hetkit"], cwd=tmp_path, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
