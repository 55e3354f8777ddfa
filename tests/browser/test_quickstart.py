"""The quickstart in a real JupyterLab, as a newcomer uses it: real workers, real buttons."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
LIMIT_MS = 90_000


@pytest.fixture
def quickstart(lab: Any, browser: Any) -> Iterator[Any]:
    """The notebook, opened as it is shipped, in a page that has room for the whole dashboard."""
    from browser.lab import Notebook

    shutil.copyfile(QUICKSTART, lab.root / QUICKSTART.name)
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    yield Notebook(context.new_page(), lab.url(QUICKSTART.name))
    context.close()
    lab.end_kernels()


def cells_until(text: str) -> list[int]:
    """Numbers of the code cells up to the one that contains ``text``."""
    cells = nbformat.read(QUICKSTART, as_version=4).cells
    last = next(
        i for i, cell in enumerate(cells) if text in cell.source and cell.cell_type == "code"
    )
    return [i for i, cell in enumerate(cells[: last + 1]) if cell.cell_type == "code"]


def await_head(page: Any, condition: str, *arguments: Any) -> None:
    """Waits until the JavaScript ``condition`` on the strip's head text holds."""
    page.wait_for_function(
        f"(argument) => (text => {condition})"
        "(document.querySelector('.hk-head')?.textContent ?? '')",
        arg=arguments[0] if arguments else None,
        timeout=LIMIT_MS,
    )


def await_epoch(page: Any, epoch: int) -> None:
    await_head(page, r"Number(/epoch (\d+)/.exec(text)?.[1] ?? 0) >= argument", epoch)


def look_at_strip(page: Any) -> None:
    """Scrolls to the strip: what is not on the screen is not drawn."""
    page.wait_for_selector(".hk-head", state="attached", timeout=LIMIT_MS)
    page.evaluate("() => document.querySelector('.hetkit-strip').scrollIntoView({block: 'end'})")


def show_dashboard(notebook: Any) -> list[int]:
    """Runs the cells up to the session's; returns their numbers."""
    cells = cells_until("hk.Session(")
    for number in cells:
        notebook.run_cell(number)
    look_at_strip(notebook.page)
    return cells


def ledger_of(notebook: Any, number: int) -> str:
    notebook.run_cell(number)
    return "".join(
        "".join(output["data"].get("text/plain", ""))
        for output in notebook.outputs(number)
        if "data" in output
    )


def test_a_newcomer_runs_watches_and_switches(quickstart: Any) -> None:
    page = quickstart.page
    show_dashboard(quickstart)
    page.get_by_label("Epochs", exact=True).fill("6")
    page.get_by_label("Epochs", exact=True).press("Tab")
    draw: Callable[[], list[str]] = lambda: page.evaluate(  # noqa: E731
        "() => [...document.querySelectorAll('.hk-chart canvas')].map(c => c.toDataURL())"
    )
    before = draw()
    quickstart.button("Run").click()
    await_epoch(page, 2)
    assert all(now != then for now, then in zip(draw(), before, strict=True)), "the charts move"

    page.get_by_label("Batches", exact=True).select_option(label="auto")
    await_epoch(page, 3)
    page.get_by_label("AMP", exact=True).select_option(label="auto")
    page.get_by_label("Compression", exact=True).select_option(label="fp16")
    await_epoch(page, 5)
    quickstart.screenshot("quickstart_running")
    await_head(page, "text.includes('ready')")

    notebook = nbformat.read(QUICKSTART, as_version=4)
    number = next(i for i, cell in enumerate(notebook.cells) if cell.source == "session.ledger")
    text = ledger_of(quickstart, number)
    rows = [
        line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert len(rows) == 6
    assert "off" in rows[0], "the first epoch ran without AMP"
    assert "bf16" in rows[5], "AMP took effect at a later epoch"
    assert "fp16" in rows[5], "and so did the compression"
    assert not quickstart.errors


def test_cells_and_buttons_work_while_it_trains_and_a_reload_finds_it_again(
    quickstart: Any,
) -> None:
    page = quickstart.page
    cells = show_dashboard(quickstart)
    quickstart.button("Run").click()
    await_epoch(page, 2)
    # A cell while it trains: the kernel is free.
    quickstart.run_cell(cells[-2], limit_s=10)
    look_at_strip(page)
    quickstart.button("Pause").click()
    await_head(page, "text.includes('paused')")
    quickstart.reload()
    look_at_strip(page)
    await_head(page, "text.includes('paused')")
    quickstart.button("Stop").click()
    await_head(page, "text.includes('ready')")
    assert not quickstart.errors
