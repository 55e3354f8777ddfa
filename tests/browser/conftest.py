"""Fixtures of the browser tests: one server and one browser, a fresh page for each test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from browser.lab import Lab, Notebook, chromium, write_notebook
from playwright.sync_api import Browser

OpenNotebook = Callable[..., Notebook]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("notebooks")
    state = tmp_path_factory.mktemp("jupyter")
    with Lab(root, state, python_path=TESTS) as server:
        yield server


@pytest.fixture
def open_notebook(
    lab: Lab, browser: Browser, request: pytest.FixtureRequest
) -> Iterator[OpenNotebook]:
    """Writes the given cells as a notebook and opens it in a page of 1280 × 800."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})

    def open_cells(*cells: str) -> Notebook:
        name = f"{request.node.name}.ipynb"
        write_notebook(lab.root / name, *cells)
        return Notebook(context.new_page(), lab.url(name))

    yield open_cells
    context.close()
    lab.end_kernels()
