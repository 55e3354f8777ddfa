"""Every notebook runs from top to bottom on a machine without a GPU, and shows what it promises."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=150,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return notebook


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs
    )


@pytest.fixture(scope="module")
def quickstart() -> Any:
    return execute(FOLDER / "01_quickstart.ipynb")


def test_quickstart_balances_and_gives_the_model_back(quickstart: Any) -> None:
    text = printed(quickstart)
    speedup = re.search(r"balanced against even: ([\d.]+)x", text)
    accuracy = re.search(r"test accuracy: ([\d.]+)%", text)
    assert speedup is not None
    assert accuracy is not None
    # The speed-up is a timing: printed here, measured by the benchmark, never asserted.
    print(f"balanced against even: {speedup[1]}x; test accuracy {accuracy[1]} %")
    split = re.search(r"^\((\d+), (\d+)\)$", text, re.M)
    assert split is not None
    assert int(split[1]) > int(split[2]), "the A100 gets more of the batch"
    assert float(accuracy[1]) >= 97.0


def test_quickstart_shows_the_dashboard_and_the_ledger(quickstart: Any) -> None:
    kinds = [
        kind
        for cell in quickstart.cells
        for output in cell.get("outputs", ())
        for kind in output.get("data", {})
    ]
    assert "application/vnd.jupyter.widget-view+json" in kinds
    assert "text/html" in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_numbered_and_says_what_it_shows_and_how_long_it_takes(path: Path) -> None:
    assert re.match(r"\d\d_\w+$", path.stem)
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert re.search(r"minute|second", first.source)


@pytest.fixture(scope="module")
def unlike_devices() -> Any:
    return execute(FOLDER / "02_unlike_devices.ipynb")


def samples_per_rank(text: str, words: str) -> list[int]:
    found = re.search(words + r": \(([\d, ]+)\)", text)
    assert found is not None, text
    return [int(number) for number in found[1].split(",")]


def test_unlike_devices_get_unlike_batches_and_a_hot_one_gets_less(unlike_devices: Any) -> None:
    text = printed(unlike_devices)
    automatic = samples_per_rank(text, "samples per rank")
    assert sum(automatic) == 192
    assert min(automatic[:2]) > max(automatic[2:]), "an A100 gets more than a V100"
    heated = samples_per_rank(text, "samples per rank, after the heat")
    assert sum(heated) == 192
    assert heated[3] < min(heated[2], heated[4], heated[5]), "V100 #3 is the hot one"
    assert "first measurements" in text, "the decisions are shown"
    assert "Use " in text, "the verdict is shown"
