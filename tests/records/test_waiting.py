import io
import re
import sys
import types

import pytest

from hetkit.records.history import History
from hetkit.records.status import Progress, Status
from hetkit.records.waiting import describe, follow

RUNNING = Status(
    state="running",
    progress=Progress(
        epoch=1,
        epochs_target=4,
        step=15,
        epoch_first_step=10,
        epoch_steps=10,
        eta_s=61.0,
        samples_per_s=1234.0,
    ),
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def history():
    return History(["A100 #0", "cpu #1"], [True, False])


def ends_after(turns):
    left = [turns]

    def ended(seconds):
        assert 0 < seconds < 2.0
        left[0] -= 1
        return left[0] <= 0

    return ended


def test_the_line_says_where_it_stands():
    line = describe(RUNNING)
    assert line.startswith("running · epoch 2/4 · step 15 · 1,234 samples/s")
    assert line.endswith("left")


def test_the_last_epoch_is_not_counted_beyond():
    done = Status(state="ready", progress=Progress(epoch=4, epochs_target=4, step=40))
    assert "epoch 4/4" in describe(done)


def test_what_is_not_known_is_not_said():
    assert describe(Status(state="starting")) == "starting"


def test_a_file_stays_silent(history, monkeypatch):
    """That a test runner had imported ipykernel made every script of its a notebook."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    stream = io.StringIO()
    follow(lambda: RUNNING, history, ends_after(3), stream)
    assert stream.getvalue() == ""


def test_a_notebook_gets_one_line_that_is_written_over(history, monkeypatch):
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    stream = io.StringIO()
    shown = iter([RUNNING, Status(state="ready")])
    follow(lambda: next(shown), history, ends_after(2), stream)
    first, second = stream.getvalue().rstrip("\n").split("\r")[1:]
    assert first == describe(RUNNING)
    assert second.rstrip() == "ready"
    assert len(second) == len(first), "what was longer before would shine through"
    assert stream.getvalue().endswith("\n")


def test_a_terminal_shows_every_device_and_marks_the_emulated(history):
    """A device without a reading has a dash, never a 0."""
    pytest.importorskip("rich")
    stream = Terminal()
    follow(lambda: RUNNING, history, ends_after(2), stream)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
    assert "A100 #0 (emulated)" in text
    assert "cpu #1" in text
    assert "cpu #1 (emulated)" not in text
    assert "–" in text
    assert "epoch 2/4" in text
