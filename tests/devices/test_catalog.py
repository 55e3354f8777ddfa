import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit import DeviceError
from hetkit.devices.catalog import catalog, find_spec, fold, known_spec


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("A100", "A100-SXM4-40"),
        ("a100 80gb", "A100-SXM4-80"),
        ("V100", "V100-SXM2-16"),
        ("V100-SXM2-32", "V100-SXM2-32"),
        ("v100 sxm2 32 GB", "V100-SXM2-32"),
        ("3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("1080 Ti", "GTX 1080 Ti"),
        ("GTX1080Ti", "GTX 1080 Ti"),
        ("mi250x", "MI250X"),
        ("cpu", "CPU"),
    ],
)
def test_names(name: str, spec: str) -> None:
    assert find_spec(name).name == spec


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX 1080 Ti"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_that_drivers_give(name: str, spec: str) -> None:
    assert find_spec(name).name == spec


@pytest.mark.parametrize("name", ["RTX 3090 Ti", "A100X", "NVIDIA A10G", "L40", "", "GPU"])
def test_other_cards_are_not_taken_for_known_ones(name: str) -> None:
    assert known_spec(name) is None


def test_an_unknown_name_lists_the_closest() -> None:
    with pytest.raises(DeviceError, match=r"closest are .*A100-SXM4-40.*It has: .*MI300X"):
        find_spec("A1000")


def test_figures() -> None:
    v100 = find_spec("V100")
    assert v100.memory_bytes == 16 * 2**30
    assert (v100.fp32_flops, v100.fp16_flops, v100.bf16_flops) == (15.7e12, 125e12, None)
    assert (v100.memory_bytes_per_s, v100.link_bytes_per_s) == (900e9, 300e9)
    old = find_spec("1080 Ti")
    assert (old.architecture, old.fp16_flops, old.tf32_flops) == ("6.1", None, None)


def test_one_die_of_an_mi250x_is_half_a_module() -> None:
    die = find_spec("MI250X")
    assert die.memory_bytes == 64 * 2**30
    assert die.fp32_flops == pytest.approx(23.95e12)
    assert "half" in die.sources["fp32_flops"]


def test_every_figure_has_a_source() -> None:
    for spec in catalog().values():
        assert spec.vendor == "cpu" or spec.sources["*"]
    assert "not verified" in find_spec("A100-SXM4-80").sources["memory_bytes_per_s"]
    assert "memory_bytes_per_s" not in find_spec("A100").sources


def test_names_do_not_clash() -> None:
    folded = [fold(name) for name in catalog()]
    assert len(set(folded)) == len(folded)


def test_bf16_begins_at_capability_8() -> None:
    for spec in catalog().values():
        if spec.vendor == "nvidia":
            assert (spec.bf16_flops is not None) == (float(spec.architecture) >= 8.0)


def test_the_catalogue_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        catalog()["A100"] = find_spec("T4")  # type: ignore[index]


@given(st.text(max_size=30))
def test_any_name_is_found_or_refused(name: str) -> None:
    if known_spec(name) is None:
        with pytest.raises(DeviceError, match="It has"):
            find_spec(name)
    else:
        assert find_spec(name).name in catalog()


@given(st.sampled_from(sorted(catalog())), st.data())
def test_spelling_makes_no_difference(name: str, data: st.DataObject) -> None:
    letters = [data.draw(st.sampled_from([c.upper(), c.lower()])) for c in name]
    spelled = "".join(data.draw(st.sampled_from(["", " "])) + c for c in letters)
    spelled = spelled.replace("-", data.draw(st.sampled_from(["", "-", " ", "_"])))
    assert find_spec(spelled).name == name
