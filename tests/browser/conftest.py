"""Fixtures of the browser tests: one server for all, a fresh browser and page for each."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))


@pytest.fixture
def browser() -> Iterator[Any]:
    """One for each test: Chromium's helper processes outlive a closed page by some seconds."""
    from browser.lab import chromium

    with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from browser.lab import Lab

    root = tmp_path_factory.mktemp("notebooks")
    state = tmp_path_factory.mktemp("jupyter")
    with Lab(root, state, python_path=TESTS) as server:
        yield server


@pytest.fixture
def open_notebook(
    lab: Any, browser: Any, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """Writes the given cells as a notebook and opens it in a page of 1280 × 800."""
    from browser.lab import Notebook, write_notebook

    context = browser.new_context(viewport={"width": 1280, "height": 800})

    def open_cells(*cells: str) -> Any:
        name = f"{request.node.name}.ipynb"
        write_notebook(lab.root / name, *cells)
        return Notebook(context.new_page(), lab.url(name))

    yield open_cells
    context.close()
    lab.end_kernels()
