import dataclasses
import re
import sys

import pytest

from hetkit.records.ledger import Ledger

LABELS = ("A100 #0", "V100 #1")


@pytest.fixture
def ledger(row):
    return Ledger(
        LABELS,
        [
            row(0, batches=(32, 32), step_s=0.4),
            row(
                1,
                batches=(45, 19),
                step_s=0.25,
                metrics={"loss": 0.5, "accuracy": 0.9},
                changes=("batches: even → auto",),
                events=("re-planned at step 4",),
            ),
        ],
    )


def test_it_is_a_sequence_of_rows(ledger, row):
    assert len(ledger) == 2
    assert ledger[-1].epoch == 1
    assert [each.epoch for each in ledger] == [0, 1]
    assert isinstance(ledger[1:], Ledger)
    assert ledger[1:][0] is ledger[1]
    ledger.add(row(2))
    assert [each.epoch for each in reversed(ledger)] == [2, 1, 0]
    with pytest.raises(IndexError):
        ledger[3]


def test_the_text_shows_what_the_change_did(ledger):
    text = str(ledger)
    caption, headers, _, first, second, note = text.splitlines()
    assert "emulated" in caption
    assert "vs even" in headers
    assert "1.00×" in first
    assert "1.60×" in second
    assert "45 + 19" in second
    assert note == "epoch 1: batches: even → auto; re-planned at step 4"
    # Metrics that the first epoch does not have are dashes there, not zeros.
    assert first.split()[-2:] == ["–", "–"]
    assert second.split()[-2:] == ["0.5000", "0.9000"]
    assert repr(ledger) == text


def test_without_an_even_epoch_the_first_one_is_the_base(row):
    assert "vs first" in str(Ledger(LABELS, [row(0, batches=(40, 24))]))


def test_the_even_epoch_is_the_base_wherever_it_stands(row):
    ledger = Ledger(LABELS, [row(0, batches=(40, 24), step_s=0.2), row(1, step_s=0.4)])
    assert "2.00×" in str(ledger)


def test_columns_come_with_their_values(row):
    plain = str(Ledger(LABELS, [row(0)]))
    assert "–" not in plain
    assert not any(header in plain for header in ("forecast", "skipped", "floor", "lr"))
    full = row(0, predicted_step_s=0.19, spread_floor=0.012)
    full = str(Ledger(LABELS, [dataclasses.replace(full, lr=0.001)]))
    assert "forecast" in full
    assert "190 ms" in full
    assert "4.00 KiB" in full
    assert "0.001" in full
    assert "1.2 %" in full


def test_the_loss_scale_shows_with_fp16_and_the_skipped_steps_with_it(row):
    text = str(Ledger(LABELS, [dataclasses.replace(row(0), loss_scale=32768.0)]))
    assert "skipped" in text
    assert text.splitlines()[3].split()[-3:] == ["0", "32768", "1.000"]


def test_local_steps_are_marked(row):
    rows = [row(0), dataclasses.replace(row(1), sync_every=8)]
    assert "sync" not in str(Ledger(LABELS, rows[:1]))
    _, _, _, first, second = str(Ledger(LABELS, rows)).splitlines()
    assert "each step" in first
    assert "every 8 (other maths)" in second


def test_unlike_precisions_are_both_shown(row):
    assert "bf16 + fp16" in str(Ledger(LABELS, [row(0, amp=("bf16", "fp16"))]))


def test_measured_figures_are_not_called_emulated(row):
    assert "emulated" not in str(Ledger(LABELS, [row(0, emulated=False)]))


def test_whatever_a_user_named_is_harmless_in_html(row):
    evil = "<script>alert(1)</script>"
    ledger = Ledger([evil, "b"], [row(0, metrics={evil: 1.0}, changes=(evil,))])
    page = ledger._repr_html_()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 3


def test_notes_keep_to_one_line_each(row):
    assert len(str(Ledger(LABELS, [row(0, events=("a\nb\x1b[2J",))])).splitlines()) == 5


def test_an_empty_ledger_shows_and_converts():
    ledger = Ledger(LABELS)
    assert "no epoch is finished yet" in str(ledger)
    assert "no epoch is finished yet" in ledger._repr_html_()
    assert len(ledger.to_pandas()) == 0
    assert len(ledger.plot().data) > 0


def test_pandas_has_one_row_per_epoch_and_a_column_per_rank(ledger):
    frame = ledger.to_pandas()
    assert frame.epoch.tolist() == [0, 1]
    assert frame["batches[V100 #1]"].tolist() == [32, 19]
    assert frame["val_accuracy"].isna().tolist() == [True, False]
    assert frame["val_loss"].iloc[1] == 0.5
    assert frame["memory_peak_bytes[A100 #0]"].isna().all()
    assert frame.changes.tolist() == ["", "batches: even → auto"]
    assert frame.emulated.all()


def test_without_pandas_the_message_says_what_to_do(ledger, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        ledger.to_pandas()


def test_the_plot_stacks_each_rank_s_step(ledger):
    figure = ledger.plot()
    assert "emulated" in figure.layout.title.text
    throughput, *parts = figure.data
    assert list(throughput.y) == [row.samples_per_s for row in ledger]
    assert [part.name for part in parts] == [
        "data",
        "compute",
        "wait",
        "transfer",
        "codec",
        "optimizer",
        "other",
    ]
    stacked = [sum(part.y[bar] for part in parts) for bar in range(4)]
    assert stacked == pytest.approx([0.4, 0.4, 0.25, 0.25])
    assert list(parts[0].x[1]) == [*LABELS, *LABELS]


@pytest.fixture
def wide(row):
    """Everything that can be in a ledger at once: eight ranks, metrics, guard, loss scale."""
    rows = [
        row(
            epoch,
            batches=(117, 117, 64, 64, 64, 64, 11, 11),
            compression="threshold(ratio=0.05)",
            amp=("bf16",) * 2 + ("fp16",) * 6,
            metrics={"loss": 0.5, "accuracy": 0.91, "perplexity": 12.0},
            predicted_step_s=0.2,
            spread_floor=0.01,
            changes=("compression: none → threshold(ratio=0.05)", "batches: even → auto") * 3,
        )
        for epoch in range(3)
    ]
    return Ledger(
        [f"card #{rank}" for rank in range(8)],
        [
            dataclasses.replace(each, guard_cosine=0.95, loss_scale=65536.0, lr=0.001)
            for each in rows
        ],
    )


def test_the_text_keeps_to_120_columns_and_names_what_does_not_fit(wide):
    lines = str(wide).splitlines()
    assert max(map(len, lines)) <= 120
    assert "2×117 + 4×64 + 2×11" in lines[4]
    text = " ".join(" ".join(lines).split())
    assert re.search(r"not shown, for want of width: .*, floor; to_pandas\(\) has all", text)
    headers = lines[2] if "samples/s" in lines[2] else lines[1]
    assert {"epoch", "batches", "samples/s", "vs", "loss"} <= set(headers.split())


def test_html_holds_the_notes_below_their_rows_and_may_scroll_but_never_overflows(wide):
    page = wide._repr_html_()
    assert page.startswith('<div style="max-width:100%;overflow-x:auto;">')
    assert page.count("colspan") == 3
    assert page.count("batches: even → auto") == 9


def test_unlike_batches_of_many_ranks_become_a_range(row):
    batches = tuple(range(10, 26))
    assert "60+26+42+60+26+42" in str(
        Ledger([f"#{rank}" for rank in range(6)], [row(batches=(60, 26, 42, 60, 26, 42))])
    )
    assert "10…25 on 16" in str(Ledger([f"#{rank}" for rank in range(16)], [row(batches=batches)]))


def test_the_cosine_and_the_memory_show_where_there_are_readings(row):
    header = str(Ledger(LABELS, [row(0)])).splitlines()[1].split()
    assert not {"cosine", "memory"} & set(header)
    full = dataclasses.replace(row(0), guard_cosine=0.917, memory_peak_bytes=(None, 3.0 * 2**30))
    text = str(Ledger(LABELS, [full]))
    assert "0.917" in text
    assert "3.00 GiB" in text
