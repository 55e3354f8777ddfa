import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.records.history import MOST_EVENTS, RECENT_STEPS, Event, History
from hetkit.records.step_columns import curve_names

LABELS = ("A100 #0", "V100 #1")


@pytest.fixture
def history():
    return History(labels=LABELS, emulated=[True, True])


def event(step=0, kind="plan", text="rebalanced"):
    return Event(step=step, epoch=0, time_s=0.0, kind=kind, text=text)


def test_an_empty_history_has_empty_series(history):
    assert len(history) == 0
    assert history.latest is None
    assert history.version == 0
    assert history.records_since(-1) == []
    for rank in (None, 0, 1):
        for name in curve_names(rank):
            assert [len(part) for part in history.series(name, rank)] == [0, 0]


def test_a_series_equals_the_records_own_figures(history, record, rank_step):
    records = [
        record(
            step,
            ranks=(
                rank_step(0, step=step, step_s=0.1 + step / 10, batch=40 + step),
                rank_step(1, step=step, step_s=0.1 + step / 10, batch=20),
            ),
        )
        for step in range(5)
    ]
    for each in records:
        history.append(each)
    for name in curve_names(None):
        steps, values = history.series(name)
        assert steps.tolist() == [0, 1, 2, 3, 4]
        wanted = [getattr(r, name) for r in records]
        wanted = [np.nan if value is None else float(value) for value in wanted]
        np.testing.assert_allclose(values, wanted)
    for name in curve_names(0):
        wanted = [getattr(r.ranks[0], name) for r in records]
        wanted = [np.nan if value is None else float(value) for value in wanted]
        np.testing.assert_allclose(history.series(name, rank=0)[1], wanted)
    assert history.latest is records[-1]
    assert history.records_since(2) == records[3:]


def test_missing_readings_are_nan(history, record, rank_step):
    idle = rank_step(1, batch=0, compute_s=0.0, memory_bytes=None, loss=None)
    history.append(record(0, ranks=(rank_step(0, memory_bytes=5.0), idle), loss=None))
    assert np.isnan(history.series("loss")[1][0])
    assert np.isnan(history.series("pace", rank=1)[1][0])
    assert np.isnan(history.series("memory_bytes", rank=1)[1][0])
    assert history.series("memory_bytes", rank=0)[1][0] == 5.0


def test_a_rank_that_took_no_part_has_gaps(history, record, rank_step):
    history.append(record(0))
    history.append(record(1, ranks=(rank_step(1, step=1),)))
    speeds = history.series("samples_per_s", rank=0)[1]
    assert speeds[0] > 0
    assert np.isnan(speeds[1])
    assert len(history.to_pandas()) == 3


def test_a_step_done_again_replaces_the_undone_ones(history, record):
    for step in range(10):
        history.append(record(step, loss=1.0))
    history.append(record(6, loss=2.0))
    assert history.series("loss")[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert history.latest.loss == 2.0
    assert [r.step for r in history.records_since(4)] == [5, 6]


@settings(max_examples=40, deadline=None)
@given(total=st.integers(1, 400), capacity=st.integers(4, 40))
def test_a_long_run_stays_bounded_and_its_throughput_right(record, rank_step, total, capacity):
    history = History(labels=["a"], emulated=[False], capacity=capacity)
    steps_s = [0.1 + (step % 7) / 10 for step in range(total)]
    for step, step_s in enumerate(steps_s):
        history.append(record(step, ranks=(rank_step(step=step, step_s=step_s),)))
    assert len(history) <= capacity
    frame = history.to_pandas()
    assert frame.steps.sum() == total
    mean_step_s = np.average(frame.step_s, weights=frame.steps)
    assert mean_step_s == pytest.approx(np.mean(steps_s))
    # Of a merged point, speed is samples over time: so the whole run's follows from the points.
    seconds = frame.steps * frame.batch / frame.samples_per_s
    assert seconds.sum() == pytest.approx(sum(steps_s))


def test_records_and_events_are_bounded_too(history, record):
    for step in range(RECENT_STEPS + 50):
        history.append(record(step))
    for step in range(MOST_EVENTS + 10):
        history.add_event(event(step))
    assert len(history.records_since(-1)) == RECENT_STEPS
    assert len(history.events) == MOST_EVENTS
    assert history.events[0].step == 10
    assert history.version == RECENT_STEPS + 50 + MOST_EVENTS + 10


def test_events_since_a_version_come_once(history, record):
    history.add_event(event(0, text="first"))
    seen = history.version
    history.append(record(0))
    history.add_event(event(1, text="second"))
    assert [each.text for each in history.events_since(seen)] == ["second"]
    assert history.events_since(history.version) == ()


def test_an_unknown_series_names_those_there_are(history):
    with pytest.raises(ValueError, match=r"'speed' is not a series; there are: .*samples_per_s"):
        history.series("speed")
    with pytest.raises(ValueError, match="'compute_spread' is not a series"):
        history.series("compute_spread", rank=0)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        history.series("pace", rank=2)


def test_a_refused_step_changes_nothing(history, record, rank_step):
    for step in range(3):
        history.append(record(step))
    with pytest.raises(ValueError, match="rank 5, but the history was made for 2 ranks: A100 #0"):
        history.append(record(1, ranks=(rank_step(5, step=1),)))
    assert len(history) == 3
    assert history.version == 3


@pytest.mark.parametrize(("labels", "emulated"), [([], []), (["a"], []), (["a"], [True, False])])
def test_labels_and_flags_must_agree(labels, emulated):
    with pytest.raises(ValueError, match="one value per rank, at least one"):
        History(labels=labels, emulated=emulated)


def test_reading_while_writing(record):
    history = History(labels=LABELS, emulated=[True, True], capacity=64)
    records = [record(step) for step in range(2000)]

    done = threading.Event()

    def write():
        try:
            for each in records:
                history.append(each)
                if each.step % 10 == 0:
                    history.add_event(event(each.step))
        finally:
            done.set()

    def read():
        seen = 0
        while not done.is_set():
            with history.held():
                version, latest = history.version, history.latest
                steps, values = history.series("samples_per_s", rank=1)
                assert len(steps) == len(values) <= 64
                assert latest is None or steps[-1] == latest.step
            assert version >= seen
            seen = version

    with ThreadPoolExecutor(max_workers=3) as threads:
        for task in [threads.submit(work) for work in (read, read, write)]:
            task.result(timeout=60)
    assert history.version == 2000 + 200


def test_pandas_is_in_long_form(history, record):
    for step in range(3):
        history.append(record(step))
    frame = history.to_pandas()
    assert frame[["step", "rank"]].to_numpy().tolist() == [
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
        [2, 0],
        [2, 1],
    ]
    assert set(frame.device) == set(LABELS)
    assert frame.emulated.all()
    assert {"steps", "compute_s", "pace", "all_samples_per_s", "all_loss"} <= set(frame.columns)


def test_without_pandas_the_message_says_what_to_do(history, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas") as caught:
        history.to_pandas()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_plot_shows_each_rank_the_marks_and_that_it_is_emulated(history, record):
    for step in range(3):
        history.append(record(step))
    history.add_event(event(1, text="amp: off → <b>bf16"))
    history.add_event(event(1, kind="output", text="a printed line"))
    figure = history.plot()
    names = [trace.name for trace in figure.data]
    assert names[:2] == ["A100 #0 (emulated)", "V100 #1 (emulated)"]
    assert "emulated" in figure.layout.title.text
    assert len(figure.layout.shapes) == 1
    assert figure.data[-1].text == ("plan: amp: off → &lt;b&gt;bf16",)


def test_an_empty_history_can_be_plotted():
    history = History(labels=["cpu #0"], emulated=[False])
    assert "emulated" not in history.plot().layout.title.text
    assert repr(history) == "History(1 device; 0 steps in 0 points; 0 events)"


def test_the_room_loads_no_heavy_library():
    heavy = ("torch", "pandas", "plotly", "IPython", "ipywidgets")
    code = (
        "import sys, hetkit.records.history, hetkit.records.ledger;"
        f"sys.exit(str([name for name in {heavy} if name in sys.modules] or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == ""


def test_the_guard_the_scale_and_the_memory_have_panels_where_they_have_readings(record, rank_step):
    history = History(labels=["A100 #0", "V100 #1"], emulated=[True, True])
    history.append(record(0))
    plain = [note.text for note in history.plot().layout.annotations]
    assert len(plain) == 3
    ranks = (rank_step(0, step=1, memory_peak_bytes=2e9), rank_step(1, step=1))
    history.append(record(1, ranks=ranks, guard_cosine=0.9, guard_error=0.4, loss_scale=1024.0))
    assert history.series("guard_cosine")[1].tolist()[1] == 0.9
    assert history.series("wire_bytes")[1].tolist() == [4096.0, 4096.0]
    figure = history.plot()
    assert len(figure.layout.annotations) == 6
    (cosine,) = (curve for curve in figure.data if curve.name == "cosine")
    assert (list(cosine.x), list(cosine.y), cosine.mode) == ([1], [0.9], "lines+markers")
