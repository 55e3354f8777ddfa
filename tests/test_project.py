"""The project's own files agree with each other and keep the code's habits."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hetkit as hk

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "hetkit").rglob("*.py"))
SCRIPTS = sorted((ROOT / "hetkit").rglob("*.js"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONDA_NAMES = {"pytorch": "torch"}
"""conda-forge's name of a package to its name on the Python index."""

PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""Packages that only a GPU build of PyTorch brings, and pins itself."""


def by_name(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = by_name([line for line in lines if line and not line.startswith("#")])
    found = {}
    for name, requirement in wanted.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is not an exact pin"
        found[name] = Version(specifier.version)
    return found


def test_conda_users_get_what_pip_users_get() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    lines = [line for line in environment["dependencies"] if isinstance(line, str)]
    (by_pip,) = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    assert by_pip == ["-e ."]
    assert "conda-forge" in environment["channels"]

    conda = by_name(lines)
    conda = {CONDA_NAMES.get(name, name): requirement for name, requirement in conda.items()}
    python, _ = conda.pop("python"), conda.pop("pip")
    assert str(python.specifier) == PROJECT["requires-python"]
    wanted = by_name(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["lab"])
    assert {n: str(r.specifier) for n, r in conda.items()} == {
        n: str(r.specifier) for n, r in wanted.items()
    }


def test_the_pins_satisfy_every_range() -> None:
    pinned = pins()
    extras = PROJECT["optional-dependencies"]
    for name, wanted in by_name(PROJECT["dependencies"] + extras["lab"] + extras["dev"]).items():
        assert name in pinned, f"constraints.txt does not pin {name}: run `make pins`"
        assert pinned[name] in wanted.specifier
    assert pinned["torch"].local is None, "a build such as +cpu is not for every machine"


def test_the_pins_cover_everything_that_is_brought_along() -> None:
    """Follows the installed packages' own requirements from ours on."""
    pinned, seen = pins(), set()
    extras = PROJECT["optional-dependencies"]
    waiting = list(map(Requirement, PROJECT["dependencies"] + extras["lab"] + extras["dev"]))
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen or name.startswith(PINNED_BY_TORCH):
            continue
        seen.add((name, *requirement.extras))
        assert name in pinned, f"constraints.txt does not pin {name}: run `make pins`"
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                waiting.append(needed)


@pytest.mark.parametrize("name", ["constraints.txt", "environment.yml", "Makefile", ".ci/run"])
def test_where_packages_come_from_is_left_to_the_user(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"index-url|find-links|https?://|/root/|/work/", text)


def test_the_changelog_has_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == hk.__version__


def test_the_drawn_rooms_are_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in contracts["contracts"] if c["type"] == "layers"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawing = re.findall(r"^   +([a-z]+(?: +· +[a-z]+)*)(?: {4,}|$)", text, re.MULTILINE)
    drawn = [re.findall(r"[a-z]+", line) for line in drawing]
    assert drawn == [re.findall(r"[a-z]+", line) for line in layers]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z]+):(?!=)", text, re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?m)(?:`|^\s*(?:\$ )?)make ([a-z]+)", text))
    assert "test" in named
    assert named <= make_targets()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_alone_lists_every_command() -> None:
    listed = set(re.findall(r"^  make (\w+) +\w", make().stdout, re.MULTILINE))
    assert listed == make_targets()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_an_old_python_is_refused_with_a_remedy(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = make("setup", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert run.returncode != 0
    assert f"hetkit needs Python 3.11 or newer, and '{old}' is not." in run.stderr
    assert "make setup PYTHON=python3.12" in run.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_setting_up_twice_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "installed.stamp").touch()
    run = make("setup", f"VENV={tmp_path}", "PYTHON=/nonexistent/python")
    assert run.returncode == 0, run.stderr
    assert "pip" not in run.stdout
    again = make("setup", "--dry-run", "--what-if=pyproject.toml", f"VENV={tmp_path}")
    assert "pip install" in again.stdout, "changed requirements are installed"


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_thing(path: Path) -> None:
    text = path.read_text()
    lines = len(text.splitlines())
    assert lines <= 400, f"{lines} lines: past 400 a file is two things"
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short_and_speak_through_logging(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            lines -= len((ast.get_docstring(node) or "").splitlines())
            assert lines <= 60, f"{node.name} has {lines} lines beside its docstring, past 60"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print" or path.name == "cli.py", f"print, line {node.lineno}"


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_saved_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert re.match(r"\d\d_\w+", path.stem), "notebooks are numbered"
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
