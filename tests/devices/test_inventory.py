import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import hetkit as hk
from hetkit.devices import inventory
from hetkit.devices.host import Host, TorchBuild
from hetkit.devices.inventory import card_findings, devices, host_findings
from hetkit.devices.nvml import Card


def test_without_a_driver(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(driver=False)
    text = str(devices())
    assert "No NVIDIA card: no NVIDIA driver answers (Driver Not Loaded)." in text
    assert 'hk.emulate("1xA100 + 1xV100")' in text


def test_with_cards(
    fake_nvml: Callable[..., Any], unlike_cards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "torch_build", lambda: TorchBuild(version="2.9", cuda="12.6"))
    fake_nvml(*unlike_cards)
    found = devices()
    text = repr(found)
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("cuda:")}
    assert found.driver == "550.54.15"
    assert "GTX 1080 Ti" in rows["cuda:0"]
    assert "bf16" not in rows["cuda:0"]
    assert "24 GiB" in rows["cuda:1"]
    assert "37%" in rows["cuda:1"]
    assert "123 of 350 W" in rows["cuda:1"]
    assert "bf16, fp16" in rows["cuda:1"]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in text


def test_missing_readings_are_dashes(
    fake_nvml: Callable[..., Any], make_card: Callable[..., Any]
) -> None:
    fake_nvml(make_card(name="<i>Card</i>", fails=frozenset({"MemoryInfo", "PowerUsage"})))
    found = devices()
    row = next(line for line in str(found).splitlines() if "Card" in line)
    assert row.count("–") == 3
    assert "<i>" not in found._repr_html_()


def findings(cards: list[Card], environ: dict[str, str], cuda: str | None = "12.6") -> str:
    build = TorchBuild(version="2.9", cuda=cuda)
    return " ".join(f.text + f.remedy for f in card_findings(tuple(cards), "", build, environ))


def test_findings_about_cards() -> None:
    card = Card(nvml_index=0, ordinal=0, name="T4")
    assert findings([card], {}) == ""
    assert "does not answer: lost" in findings([Card(nvml_index=4, problem="lost"), card], {})
    assert "built for CUDA" in findings([card], {}, cuda=None)
    hidden = findings([Card(nvml_index=0, name="T4")], {"CUDA_VISIBLE_DEVICES": "9"})
    assert "CUDA_VISIBLE_DEVICES='9' hides 1 of 1" in hidden
    assert "lists none" in findings([], {})


def test_findings_about_the_host() -> None:
    tight = Host(cores=64, quota_cores=3, shm_bytes=64 * 2**20)
    texts = [finding.text for finding in host_findings(tight, ranks=2)]
    assert "3 CPU cores for 2 cards" in texts[0]
    assert "/dev/shm has only 64 MiB" in texts[1]
    assert list(host_findings(Host(cores=4, shm_bytes=2**33), ranks=2)) == []
    assert list(host_findings(Host(cores=1), ranks=0)) == []


def test_the_function_of_the_public_face_survives_its_package() -> None:
    import hetkit.devices.fleet

    assert isinstance(hk.devices(), inventory.Inventory)
    assert hetkit.devices.fleet.Fleet is hk.Fleet


def test_neither_torch_nor_jupyter_is_loaded() -> None:
    code = (
        "import sys, hetkit as hk; str(hk.devices()); repr(hk.emulate('1xA100'));"
        "hk.devices()._repr_html_();"
        "bad = {'torch', 'IPython', 'ipywidgets'} & set(sys.modules); sys.exit(str(bad or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "\n" or done.stderr == "", done.stderr
