"""The README's examples run as they stand, and as it says: with no Jupyter library loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
JUPYTER = ("IPython", "ipykernel", "ipywidgets", "anywidget", "jupyter_client", "traitlets")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs_in_a_fresh_interpreter(number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(
        EXAMPLES[number]
        + "\nif __name__ == '__main__':\n    import sys\n"
        + f"    print('JUPYTER', sorted(set({JUPYTER!r}) & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("JUPYTER []")


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    first = re.search(r"^```console\n(.*?)^```", text, re.M | re.S)
    assert first is not None
    assert re.findall(r"^\$ (make \w+)", first[1], re.M) == ["make demo", "make test"]


def test_pictures_and_pages_that_it_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).is_file(), target
