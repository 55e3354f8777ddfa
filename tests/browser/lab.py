"""A real JupyterLab server and a Chromium page on it, to drive notebooks as a user does.

`Lab` starts the server with directories of its own, so that nothing of the user's is read, nothing
asks and nothing autosaves; `Notebook` is one open notebook, steered through `window.jupyterapp`.
Every wait has a limit, and the server is ended by its process id.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page, sync_playwright

LIMIT_S = 90.0
ARTIFACTS = Path(__file__).parents[2] / "artifacts"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
)
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


def write_notebook(path: Path, *cells: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(notebook, path)


class Lab:
    """A JupyterLab server whose root is ``root``; a context manager."""

    def __init__(self, root: Path, state: Path, *, python_path: Path | None = None) -> None:
        self.root = root
        self._state = state
        self._token = secrets.token_hex(16)
        self._port = _free_port()
        self._environment = _environment(state, python_path)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Lab":
        _write_overrides(self._state)
        command = [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self._port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self._token}",
            f"--ServerApp.root_dir={self.root}",
            "--LabApp.expose_app_in_browser=True",
            f"--LabApp.user_settings_dir={self._state / 'settings'}",
            f"--LabApp.workspaces_dir={self._state / 'workspaces'}",
        ]
        with (self._state / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._await_server()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            self.end_kernels()
        if self._process is None:
            return
        os.kill(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=20)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._port}/lab/tree/{name}?reset&token={self._token}"

    def end_kernels(self) -> None:
        """Ends the sessions, and so the kernels, that notebooks have left behind."""
        for session in json.loads(self._ask("GET", "api/sessions")):
            self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/{path}",
            method=method,
            headers={"Authorization": f"token {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())

    def _await_server(self) -> None:
        assert self._process is not None
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError, urllib.error.URLError):
                self._ask("GET", "api/status")
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.2)
        log = (self._state / "server.log").read_text(errors="replace")
        raise RuntimeError(f"JupyterLab did not start:\n{log[-4000:]}")


class Notebook:
    """One notebook, open in a page."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self._url = url
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.open()

    def open(self) -> None:
        """Opens the notebook, or opens it again as a reload does, and waits for its kernel."""
        self.page.goto(self._url, wait_until="domcontentloaded", timeout=1e3 * LIMIT_S)
        self.page.wait_for_function(
            """() => {
                const panel = window.jupyterapp?.shell.currentWidget;
                const kernel = panel?.sessionContext?.session?.kernel;
                return panel?.sessionContext?.isReady && kernel?.connectionStatus === "connected"
                    && panel.content?.widgets.length > 0 && kernel?.info !== undefined;
            }""",
            timeout=1e3 * LIMIT_S,
        )

    def reload(self) -> None:
        """Saves, and loads the page anew; the kernel runs on."""
        self.save()
        self.open()

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def run_cell(self, index: int, *, wait: bool = True, limit_s: float = LIMIT_S) -> None:
        """Runs one cell, and by default waits until it has ended."""
        self.page.evaluate(
            """(index) => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = index;
                window.hetkitCell = window.jupyterapp.commands.execute('notebook:run-cell')
                    .then(() => { window.hetkitDone = index; });
                window.hetkitDone = null;
            }""",
            index,
        )
        if wait:
            self.await_cell(index, limit_s=limit_s)

    def await_cell(self, index: int, *, limit_s: float = LIMIT_S) -> None:
        """Waits until the cell that was run last has ended; raises what it raised."""
        self.page.wait_for_function(
            "(index) => window.hetkitDone === index", arg=index, timeout=1e3 * limit_s
        )
        for output in self.outputs(index):
            if output["output_type"] == "error":
                raise AssertionError("\n".join(output["traceback"]))

    def run_all(self) -> None:
        count = self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
        )
        for index in range(count):
            self.run_cell(index)

    def outputs(self, index: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(
            """(index) => window.jupyterapp.shell.currentWidget.content.widgets[index]
                .model.outputs?.toJSON() ?? []""",
            index,
        )
        return found

    def text(self, index: int) -> str:
        """What the cell printed."""
        return "".join("".join(output.get("text", "")) for output in self.outputs(index))

    def theme(self, name: str) -> None:
        """Changes the theme: ``"JupyterLab Dark"`` or ``"JupyterLab Light"``."""
        self.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", name
        )
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_selector(
            f"body[data-jp-theme-light='{light}']", state="attached", timeout=1e3 * LIMIT_S
        )
        self.page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=1e3 * LIMIT_S)

    def button(self, text: str) -> Locator:
        # By its text: the accessible name also holds the icon's glyph.
        exactly = re.compile(rf"^\s*{re.escape(text)}\s*$")
        return self.page.locator("button.jupyter-button, button.widget-toggle-button").filter(
            has_text=exactly
        )

    def screenshot(self, name: str) -> Path:
        """Keeps a picture of the page under ``artifacts/``."""
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        self.page.screenshot(path=path)
        return path


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium, the system's or the one that Playwright has installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(state: Path, python_path: Path | None) -> dict[str, str]:
    own = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = os.environ | {name: str(state / folder) for name, folder in own.items()}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    return environment


def _write_overrides(state: Path) -> None:
    # As the user's own settings: the server's shared folder belongs to the installation.
    for plugin, values in OVERRIDES.items():
        package, _, name = plugin.rpartition(":")
        path = state / "settings" / package / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
