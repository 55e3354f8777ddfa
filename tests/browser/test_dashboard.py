"""The dashboard in a real JupyterLab, over a session of synthetic steps."""

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SHOW = """
from widgets.fake_session import FakeSession
from hetkit.widgets.dashboard import show
session = FakeSession({devices}, sample_s=0.0015)
dashboard = show(session)
"""
CALLS = "print(session.calls)"
LIMIT_MS = 60_000

OpenNotebook = Callable[..., Any]


def step_shown(notebook: Any) -> int:
    found = re.search(r"step ([\d,]+)", notebook.page.locator(".hk-head").inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


def await_step(notebook: Any, step: int) -> None:
    """Waits until the strip shows at least this step."""
    notebook.page.wait_for_function(
        r"""(step) => {
            const text = document.querySelector(".hk-head")?.textContent ?? "";
            return Number((/step ([\d,]+)/.exec(text)?.[1] ?? "0").replaceAll(",", "")) >= step;
        }""",
        arg=step,
        timeout=LIMIT_MS,
    )


def inked(notebook: Any) -> list[int]:
    """How many pixels of each chart are drawn on."""
    counts: list[int] = notebook.page.evaluate(
        """() => [...document.querySelectorAll(".hk-chart canvas")].map((canvas) => {
            const pixels = canvas.getContext("2d")
                .getImageData(0, 0, canvas.width, canvas.height).data;
            return pixels.filter((value, i) => i % 4 === 3 && value > 0).length;
        })"""
    )
    return counts


def start(open_notebook: OpenNotebook, *cells: str, devices: int = 2) -> Any:
    notebook = open_notebook(SHOW.format(devices=devices), *cells)
    notebook.run_cell(0)
    notebook.page.wait_for_selector(".hk-head", timeout=LIMIT_MS)
    return notebook


def test_run_moves_the_strip_and_controls_ask_the_session(open_notebook: OpenNotebook) -> None:
    notebook = start(open_notebook, CALLS)
    page = notebook.page
    notebook.theme("JupyterLab Light")
    assert page.locator(".hk-speed").first.inner_text().startswith("–")
    notebook.button("Run").click()
    await_step(notebook, 15)
    assert page.locator(".hk-state").inner_text() == "running"
    page.get_by_label("AMP", exact=True).select_option(label="bf16")
    page.get_by_label("Batches", exact=True).select_option(label="manual")
    page.get_by_label("samples", exact=True).first.fill("180")
    page.get_by_label("samples", exact=True).first.press("Enter")
    page.wait_for_function(
        "() => document.querySelector('.hk-card dl').textContent.includes('180 (70 %)')",
        timeout=LIMIT_MS,
    )
    notebook.screenshot("dashboard_light")
    notebook.theme("JupyterLab Dark")
    page.wait_for_selector(".hetkit-strip.hk-dark", timeout=LIMIT_MS)
    await_step(notebook, step_shown(notebook) + 20)
    notebook.screenshot("dashboard_dark")
    notebook.run_cell(1)
    calls = notebook.text(1)
    assert "('run', 10)" in calls
    assert calls.count("{'amp': 'bf16'}") == 1
    assert calls.count("{'batches': [180, 76]}") == 1
    assert notebook.errors == []


def test_the_history_is_there_again_after_a_reload(open_notebook: OpenNotebook) -> None:
    notebook = start(open_notebook, CALLS, devices=6)
    notebook.button("Run").click()
    await_step(notebook, 30)
    notebook.button("Stop").click()
    notebook.page.wait_for_selector(".hk-state[data-state='ready']", timeout=LIMIT_MS)
    before = step_shown(notebook)
    notebook.reload()
    await_step(notebook, before)
    notebook.page.locator(".hk-charts").scroll_into_view_if_needed()
    notebook.page.wait_for_timeout(500)
    assert min(inked(notebook)) > 300
    assert notebook.page.locator(".hk-card").count() == 6
    notebook.screenshot("dashboard_reloaded")
    notebook.button("Run").click()
    await_step(notebook, before + 10)
    assert notebook.errors == []


def test_it_keeps_updating_while_another_cell_runs(open_notebook: OpenNotebook) -> None:
    notebook = start(open_notebook, "import time; time.sleep(8)", CALLS)
    notebook.button("Run").click()
    await_step(notebook, 5)
    notebook.run_cell(1, wait=False)
    notebook.page.wait_for_timeout(1000)
    await_step(notebook, step_shown(notebook) + 10)
    assert notebook.page.evaluate("() => window.hetkitDone") is None, "the cell had ended before"
    notebook.await_cell(1)
    assert notebook.errors == []


def test_a_second_view_shows_the_same_and_charts_are_built_when_asked(
    open_notebook: OpenNotebook,
) -> None:
    notebook = start(open_notebook, "show(session); session.advance(60)")
    notebook.run_cell(1)
    notebook.page.wait_for_function(
        "() => document.querySelectorAll('.hk-head').length === 2", timeout=LIMIT_MS
    )
    await_step(notebook, 60)
    second = notebook.page.locator(".hk-head").nth(1)
    second.scroll_into_view_if_needed()
    second.get_by_text("step 60").wait_for(timeout=LIMIT_MS)
    assert notebook.page.locator(".hk-plot").count() == 0
    notebook.button("Charts").first.click()
    notebook.page.wait_for_selector(".hk-plot .main-svg", timeout=LIMIT_MS)
    notebook.screenshot("dashboard_charts")
    assert notebook.errors == []


def test_the_strip_is_a_named_region_with_a_table(open_notebook: OpenNotebook) -> None:
    notebook = start(open_notebook, "session.advance(5)")
    notebook.run_cell(1)
    await_step(notebook, 5)
    region = notebook.page.get_by_role("region", name="hetkit live training, emulated devices")
    region.get_by_text("Latest values as a table").click()
    cells = region.get_by_role("row").nth(1).inner_text().split()
    assert cells[:2] == ["A100", "#0"]
    assert len(cells) >= 10
    assert region.get_by_role("img").count() == 5  # a bar for each device, and three charts
