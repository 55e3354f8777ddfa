import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hetkit.records import report


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (1024**2 - 1, "1.00 MiB"),
        (5 * 2**50, "5,120 TiB"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_bytes(size, text):
    assert report.format_bytes(size) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 µs"),
        (0.0009999, "1.00 ms"),
        (0.9999, "1.00 s"),
        (59.99, "1 min 00 s"),
        (3599.8, "1 h 00 min"),
        (86400, "24 h 00 min"),
        (math.inf, "inf"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds(time_s, text):
    assert report.format_seconds(time_s) == text


def test_rates():
    assert report.format_rate(0.0) == "0 samples/s"
    assert report.format_rate(999.9) == "1,000 samples/s"
    assert report.format_rate(12.5e9, "bytes") == "12.5 GB/s"
    assert report.format_rate(30, "tokens") == "30.0 tokens/s"


@given(st.floats(allow_nan=True, allow_infinity=True) | st.none())
def test_any_reading_can_be_shown(value):
    for form in (
        report.format_bytes,
        report.format_seconds,
        report.format_rate,
        report.format_share,
        report.format_number,
    ):
        assert form(value)


CELLS = st.text(max_size=12)


@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=6))
def test_text_columns_stand_under_each_other(rows):
    lines = report.text_table(["a", "b", "|"], rows).split("\n")
    assert len(lines) == len(rows) + 2
    assert max(cell_len(line) for line in lines) <= cell_len(lines[1])


def test_text_takes_no_control_characters_and_measures_wide_ones():
    table = report.text_table(["name", "n"], [["\x1b[31mred\nline", "1"], ["速度", "12"]])
    assert "\x1b" not in table
    assert "red line" in table
    assert table.splitlines()[-1].endswith("12")
    assert len({cell_len(line) for line in table.splitlines()}) == 1


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=4), CELLS)
def test_html_holds_no_markup_of_the_user_s(rows, caption):
    page = report.html_table(["<img src=x>", "b"], rows, caption)
    assert "<img" not in page
    tags = {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    opened = [part.split()[0].rstrip(">").split(">")[0] for part in page.split("<")[1:]]
    assert {tag.lstrip("/") for tag in opened} <= tags


def test_html_has_a_caption_only_when_given():
    assert "<caption" not in report.html_table(["a"], [["1"]])
    assert "what it shows</caption>" in report.html_table(["a"], [["1"]], "what it shows")


@pytest.mark.parametrize("table", [report.text_table, report.html_table])
def test_ragged_rows_are_refused(table):
    with pytest.raises(ValueError, match="1 cells for 2 headers"):
        table(["a", "b"], [["1"]])
