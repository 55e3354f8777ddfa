from hetkit.devices.table import html_table, text_table


def test_text_is_aligned() -> None:
    lines = text_table(("a", "bb"), [("long", "x"), ("s", "–")]).splitlines()
    assert lines == ["a     bb", "long  x", "s     –"]


def test_a_table_without_rows_is_its_header() -> None:
    assert text_table(("a", "b"), []) == "a  b"


def test_html_is_escaped() -> None:
    html = html_table(("<th>",), [("<script>alert(1)</script>",)], caption="a & b")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html
