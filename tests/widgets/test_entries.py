from typing import Any

import pytest

from hetkit.compression import COMPRESSIONS, PowerSGD, TopK
from hetkit.widgets.entries import settings_controls

MIB = 2**20


@pytest.fixture
def controls(session: Any, said: list[str]) -> dict[str, Any]:
    return settings_controls(session, said.append)


def asked(session: Any) -> list[dict[str, Any]]:
    return [changes for name, changes in session.calls if name == "set"]


@pytest.mark.parametrize(
    ("name", "typed", "changes"),
    [
        ("lr", "0.01", {"lr": 0.01}),
        ("lr", " x0.5 ", {"lr": "x0.5"}),
        ("global_batch", 512, {"global_batch": 512}),
        ("bucket_bytes", "4", {"bucket_bytes": 4 * MIB}),
        ("bucket_bytes", "0.5", {"bucket_bytes": MIB // 2}),
        ("sync_every", 8, {"sync_every": 8}),
    ],
)
def test_what_is_typed_is_asked_once_and_shown(
    session: Any, controls: dict[str, Any], name: str, typed: object, changes: dict[str, object]
) -> None:
    controls[name].box.value = typed
    assert asked(session) == [changes]
    for control in controls.values():
        control.refresh()
    assert asked(session) == [changes]


@pytest.mark.parametrize("name", ["lr", "bucket_bytes"])
def test_an_emptied_box_gives_the_default_back(
    session: Any, controls: dict[str, Any], name: str
) -> None:
    controls[name].box.value = "2"
    controls[name].box.value = ""
    assert getattr(session.settings, name) is None


@pytest.mark.parametrize(
    ("name", "typed", "why"),
    [
        ("lr", "fast", "lr must be a number above 0 or a factor"),
        ("lr", "-1", "lr must be a finite number above 0"),
        ("bucket_bytes", "big", "the bucket size is a number of MiB"),
        ("bucket_bytes", "inf", "the bucket size is a number of MiB"),
        ("global_batch", 0, "global_batch must be an int of at least 1"),
        ("sync_every", 0, "sync_every must be an int of at least 1"),
    ],
)
def test_what_is_refused_goes_back_and_is_said(
    session: Any,
    controls: dict[str, Any],
    said: list[str],
    name: str,
    typed: object,
    why: str,
) -> None:
    before, settings = controls[name].box.value, session.settings
    controls[name].box.value = typed
    assert controls[name].box.value == before
    assert session.settings == settings
    assert said[-1].startswith(why)


def test_samples_per_device_become_ratios_with_another_global_batch(
    session: Any, controls: dict[str, Any]
) -> None:
    session.set(batches=[128, 64, 64])
    controls["global_batch"].box.value = 512
    assert session.settings.global_batch == 512
    assert session.settings.batches == (0.5, 0.25, 0.25)


def test_the_codec_s_parameter_has_a_box_where_it_has_one(
    session: Any, controls: dict[str, Any]
) -> None:
    codec = controls["compression"]
    assert codec.dropdown.options == COMPRESSIONS
    assert codec.box.layout.display == "none"
    codec.dropdown.value = "topk"
    assert (codec.box.layout.display, codec.box.description) == ("flex", "ratio")
    assert codec.box.value == TopK().ratio
    codec.box.value = 0.01
    assert session.settings.compression == "topk(ratio=0.01)"
    codec.dropdown.value = "powersgd"
    assert (codec.box.description, codec.box.value) == ("rank", PowerSGD().rank)
    codec.box.value = 4.0
    codec.dropdown.value = "fp16"
    assert codec.box.layout.display == "none"
    assert [changes["compression"] for changes in asked(session)] == [
        "topk",
        "topk(ratio=0.01)",
        "powersgd",
        "powersgd(rank=4)",
        "fp16",
    ]


def test_a_refused_parameter_goes_back(
    session: Any, controls: dict[str, Any], said: list[str]
) -> None:
    codec = controls["compression"]
    codec.dropdown.value = "powersgd"
    codec.box.value = 2.5
    assert codec.box.value == 2
    assert "rank must be an int from 1 to 256, not 2.5" in said[-1]
    assert session.settings.compression == "powersgd"


def test_what_a_cell_chose_shows_with_all_of_its_parameters_kept(
    session: Any, controls: dict[str, Any]
) -> None:
    codec = controls["compression"]
    session.settings = session.settings.change(compression="topk(ratio=0.1, small_bytes=0)")
    codec.refresh()
    assert (codec.dropdown.value, codec.box.value) == ("topk", 0.1)
    codec.box.value = 0.2
    assert session.settings.compression == "topk(small_bytes=0, ratio=0.2)"
    session.settings = session.settings.change(compression="task:mine")
    codec.refresh()
    assert codec.dropdown.value == "task:mine"
    assert codec.box.layout.display == "none"


def test_each_says_when_it_takes_effect_and_what_is_in_force(
    session: Any, controls: dict[str, Any]
) -> None:
    session.advance()
    assert all("next epoch" in controls[n].note.value for n in controls if n != "micro_batch")
    controls["sync_every"].box.value = 4
    assert "now 1" in controls["sync_every"].note.value
    controls["lr"].box.value = "0.5"
    assert "now task&#x27;s" in controls["lr"].note.value
    controls["bucket_bytes"].box.value = "4"
    assert "now 25<" in controls["bucket_bytes"].note.value
    controls["compression"].dropdown.value = "int8"
    assert "now none" in controls["compression"].note.value
