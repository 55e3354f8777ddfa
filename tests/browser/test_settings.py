"""Each control of the dashboard changes what the ledger shows: a real session in JupyterLab."""

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SHOW = """
import torch, hetkit as hk
task = hk.Task(
    model=lambda: torch.nn.Linear(64, 32),
    data=torch.randn(768, 64),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.3}, sample_s=2e-4, link="100MB/s")
session = hk.Session(task, devices=fleet, global_batch=32, batches="even", guard_every=2)
session.run(epochs=1)
session.wait()
session
"""
ROWS = """
session.wait()
row = session.ledger[-1]
looked = row.guard_cosine is not None
print("row:", row.compression, row.lr, row.global_batch, row.sync_every, looked)
print("bucket:", session.applied.bucket_bytes)
print(*row.changes)
"""
TIDY = "session.close()"
LIMIT_MS = 60_000


def fill(page: Any, label: str, text: str) -> None:
    box = page.get_by_label(label, exact=True)
    box.fill(text)
    box.press("Enter")


def test_each_control_changes_what_the_ledger_shows(open_notebook: Callable[..., Any]) -> None:
    notebook = open_notebook(SHOW, ROWS, ROWS, TIDY)
    page = notebook.page
    notebook.run_cell(0)
    page.wait_for_selector(".hk-head", timeout=LIMIT_MS)
    page.get_by_label("Compression", exact=True).select_option(label="topk")
    fill(page, "ratio", "0.25")
    fill(page, "Learning rate", "x0.5")
    fill(page, "Global batch", "64")
    fill(page, "Bucket, MiB", "4")
    page.get_by_text("requested bucket_bytes 4194304").wait_for(timeout=LIMIT_MS)
    notebook.button("What if?").click()
    page.get_by_text(re.compile("Predicted, emulated: a step of")).wait_for(timeout=LIMIT_MS)
    notebook.screenshot("settings_what_if")
    fill(page, "Epochs", "1")
    notebook.button("Run").click()
    notebook.run_cell(1)
    said = notebook.text(1)
    assert "row: topk(ratio=0.25) 0.05 64 1 True" in said
    assert "bucket: 4194304" in said
    assert "compression: none → topk(ratio=0.25)" in said
    page.get_by_text("Latest values as a table").click()
    page.get_by_text(re.compile("compressed gradient: cosine 0")).wait_for(timeout=LIMIT_MS)
    fill(page, "Sync every", "4")
    page.get_by_label("Compression", exact=True).select_option(label="powersgd")
    fill(page, "rank", "4")
    notebook.button("Run").click()
    notebook.run_cell(2)
    assert "row: powersgd(rank=4) 0.05 64 4" in notebook.text(2)
    notebook.button("Ledger").click()
    cell = page.get_by_role("cell", name="topk(ratio=0.25)", exact=True)
    cell.wait_for(timeout=LIMIT_MS)
    page.get_by_role("cell", name="every 4 (other maths)", exact=True).wait_for(timeout=LIMIT_MS)
    frame = "cell => cell.closest('table').parentElement"
    assert cell.evaluate(f"cell => ({frame})(cell).scrollWidth - ({frame})(cell).clientWidth") <= 0
    page.get_by_label("Compression", exact=True).scroll_into_view_if_needed()
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        notebook.screenshot(f"settings_{theme.lower()}")
    notebook.run_cell(3)
    assert notebook.errors == []
