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


FEWEST_TIMES = {
    "fp16": 1.98,
    "bf16": 1.98,
    "int8": 3.9,
    "int4": 7.5,
    "powersgd": 50.0,
    "topk": 9.5,
    "threshold": 9.5,
    "topk(ratio=0.01)": 45.0,
}
KEEPS_DIRECTION = {"fp16", "bf16", "int8", "int4"}
slow = pytest.mark.timeout(420)  # the first test waits for the whole notebook


@pytest.fixture(scope="module")
def compression_lab() -> str:
    return printed(execute(FOLDER / "03_compression_lab.ipynb"))


def table_below(text: str, heading: str) -> dict[str, list[str]]:
    """Returns the cells of a printed table by codec, down to the first line that is no codec's."""
    found: dict[str, list[str]] = {}
    for line in text[text.index(heading) :].splitlines()[1:]:
        codec, *cells = line.split() or [""]
        if codec != "none" and codec not in FEWEST_TIMES:
            break
        found[codec] = cells
    return found


@slow
@pytest.mark.parametrize("heading", ["digits, SGD", "characters, AdamW"])
def test_compression_lab_shows_the_direction_that_each_codec_keeps(
    compression_lab: str, heading: str
) -> None:
    for codec, (*_, cosine, error) in table_below(compression_lab, heading).items():
        if codec == "none":
            assert (cosine, error) == ("–", "–"), "nothing to compare"
            continue
        # With error feedback the codec's step is another one by design: a single look may be low.
        lowest = 0.8 if codec in KEEPS_DIRECTION else -1.0
        assert lowest <= float(cosine) <= 1.0, codec
        assert float(error) >= 0.0


@slow
def test_compression_lab_has_every_codec_with_its_bytes_and_accuracy(compression_lab: str) -> None:
    table = table_below(compression_lab, "digits, SGD")
    assert table.keys() == {"none", *FEWEST_TIMES}
    sent_bytes = {codec: float(cells[0].replace(",", "")) for codec, cells in table.items()}
    accuracy = {codec: float(cells[2].rstrip("%")) for codec, cells in table.items()}
    for codec, times in FEWEST_TIMES.items():
        assert sent_bytes["none"] / sent_bytes[codec] >= times, codec
        assert accuracy[codec] >= 85.0, codec
    assert all(abs(accuracy[codec] - accuracy["none"]) <= 1.5 for codec in KEEPS_DIRECTION)


@slow
def test_compression_lab_shows_what_error_feedback_costs_beside_adam(compression_lab: str) -> None:
    table = table_below(compression_lab, "characters, AdamW")
    loss = {codec: float(cells[2]) for codec, cells in table.items()}
    assert abs(loss["int8"] - loss["none"]) <= 0.02
    assert loss["topk"] > loss["int8"]
    assert loss["powersgd"] > loss["int8"]


@slow
def test_compression_lab_times_every_codec_at_three_rates(compression_lab: str) -> None:
    table = table_below(compression_lab, "digits                ")
    assert table.keys() == {"none", *FEWEST_TIMES}
    assert all(len(cells) == 9 for cells in table.values()), "a step, its unit and a speed each"
    for link in ("10GB/s", "100MB/s", "10MB/s"):
        assert re.search(
            rf"^ *{link}: compression='.+', (leave it off|[\d.]+x)$", compression_lab, re.M
        )
