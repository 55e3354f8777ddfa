"""The codecs as text and as data."""

import pytest

import hetkit as hk
from hetkit.compression import COMPRESSIONS, Custom, parse_compression


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_every_name_stands_for_itself(name):
    assert str(parse_compression(name)) == name
    assert parse_compression(name).name == name


def test_a_codec_with_parameters_is_its_text():
    assert hk.Settings(compression=hk.TopK(0.01)).compression == "topk(ratio=0.01)"
    assert hk.Settings(compression=Custom("mine")).compression == "task:mine"
    assert parse_compression("task:mine") == Custom("mine")


@pytest.mark.parametrize(
    "wrong",
    [
        "zip",
        "",
        7,
        None,
        "bf16(3)",
        "fp16(x=2)",
        "fp16(__import__('os'))",
        "fp16(",
        "fp16()()",
        "task:",
        "task:a b",
    ],
)
def test_what_names_no_codec_is_refused(wrong):
    with pytest.raises(hk.SettingsError):
        parse_compression(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hk.TopK(0),
        lambda: hk.TopK(1.1),
        lambda: hk.TopK(float("nan")),
        lambda: hk.TopK(True),
        lambda: hk.Threshold("a"),
        lambda: hk.PowerSGD(0),
        lambda: hk.PowerSGD(2.0),
        lambda: hk.Int8(block=3),
        lambda: hk.Int4(block=10**6),
    ],
)
def test_a_parameter_out_of_its_range_is_refused_with_the_range(make):
    with pytest.raises(hk.SettingsError, match="must be"):
        make()
