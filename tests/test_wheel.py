"""The package as users get it: built, installed apart from the checkout, and tested there."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetkit as hk

ROOT = Path(__file__).parents[1]

RUN = """
import sys
from pathlib import Path

import hetkit
import pytest

home, tests = Path(sys.argv[1]), sys.argv[2:]
assert Path(hetkit.__file__).is_relative_to(home), f"hetkit came from {hetkit.__file__}"
options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--color=no"]
sys.exit(pytest.main([*options, "--strict-markers", "-o", "markers=browser", *tests]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built wheel. Built from a copy, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hetkit", source / "hetkit", ignore=shutil.ignore_patterns("*.pyc"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    run = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = folder.glob("*.whl")
    yield built
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = wheel.parent / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index"]
    run = subprocess.run(
        [*pip, "--no-deps", "--target", str(target), str(wheel)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return target


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hetkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package <= names
    assert {"hetkit/py.typed", "hetkit/widgets/strip.js"} <= names
    assert all(
        name.startswith(("hetkit/", f"hetkit-{hk.__version__}.dist-info/")) for name in names
    )


def test_its_metadata_says_who_it_is_and_how_it_starts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"hetkit-{hk.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
    assert f"Version: {hk.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "hetkit = hetkit.cli:main" in entry_points
    assert "[hetkit.display]\njupyter = hetkit.widgets.dashboard:show" in entry_points
    assert license_text == (ROOT / "LICENSE").read_text()


def test_the_unit_tests_pass_against_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """From a clean folder, with ``-P``: neither the checkout nor its folder is on the path."""
    tests = tmp_path / "tests"
    shutil.copytree(ROOT / "tests" / "planning", tests / "planning")
    for name in ("conftest.py", "test_settings.py", "test_task.py", "test_plan.py"):
        shutil.copy(ROOT / "tests" / name, tests)
    env = {**os.environ, "PYTHONPATH": str(installed), "HETKIT_TEST_EXAMPLES": "10"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", RUN, str(installed), "tests"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def test_what_the_wheel_shows_in_a_browser_can_be_read_from_it(installed: Path) -> None:
    code = "from importlib.resources import files; f = files('hetkit.widgets') / 'strip.js'"
    run = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}; print(f, len(f.read_text()))"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    path, length = run.stdout.split()
    assert Path(path).is_relative_to(installed)
    assert int(length) > 0
