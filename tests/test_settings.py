import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.compression import COMPRESSIONS
from hetkit.settings import AMP_MODES, Settings, lr_factor

NAMES = [field.name for field in dataclasses.fields(Settings)]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**60)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([*AMP_MODES, *COMPRESSIONS, "auto", "even", "x0.5", "x1e999", "x0", "x-1"])
    | st.binary(max_size=4)
    | st.complex_numbers()
    | st.fractions()
    | st.decimals()
    | st.sampled_from(
        [
            object(),
            np.int64(3),
            np.float32(2),
            np.bool_(True),
            np.array(5),
            10**400,
            Fraction(10**400),
        ]
    )
)
JUNK = (
    SCALARS
    | st.lists(SCALARS, max_size=4)
    | st.lists(st.lists(SCALARS, max_size=2), max_size=2)
    | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
    | st.sets(st.integers(), max_size=3)
    | st.lists(st.integers(0, 9), max_size=4).map(np.array)
)


@given(st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=4))
def test_junk_is_refused_as_a_settings_error_or_makes_good_settings(junk: dict[str, Any]) -> None:
    try:
        settings = Settings(**junk)
    except hk.SettingsError:
        return
    assert 1 <= settings.global_batch < 2**63
    assert settings.lr is None or isinstance(settings.lr, str) or 0 < settings.lr < math.inf
    assert settings == Settings(**{n: getattr(settings, n) for n in NAMES})
    hash(settings)


@given(st.text(max_size=12), JUNK)
def test_a_change_of_junk_is_a_settings_error_or_is_made(name: str, value: Any) -> None:
    before = Settings(global_batch=64)
    if name in NAMES:
        return
    with pytest.raises(hk.SettingsError, match="is not a setting; there are: batches, micro_batch"):
        before.change(**{name: value})
    assert before == Settings(global_batch=64)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=8).filter(sum))
def test_batches_that_sum_to_the_global_batch_are_taken(batches: list[int]) -> None:
    settings = Settings(batches=batches, global_batch=sum(batches))
    assert settings.batches == tuple(batches)
    with pytest.raises(hk.SettingsError, match=f"sum to {sum(batches)}, not to the global batch"):
        settings.change(global_batch=sum(batches) + 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(sum))
def test_ratios_are_taken_whatever_they_sum_to(ratios: list[float]) -> None:
    assert Settings(batches=ratios).batches == tuple(ratios)


def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    settings = Settings(
        batches=np.array([48, 16]),
        global_batch=np.int64(64),
        lr=np.float32(0.5),
        clip_norm=Fraction(1, 2),
        micro_batch=np.int32(8),
    )
    assert settings.batches == (48, 16)
    kinds = [type(v) for v in (*settings.batches, settings.global_batch, settings.micro_batch)]
    assert kinds == [int] * 4
    assert [type(settings.lr), type(settings.clip_norm)] == [float, float]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"amp": "fp8"}, "amp must be one of off, auto, bf16, fp16, not 'fp8'"),
        ({"amp": ["bf16", "fp8"]}, "amp must be one of .* not 'fp8'"),
        ({"amp": []}, "amp is an empty list: give one precision for each device"),
        ({"batches": "fair"}, 'batches must be "auto", "even", a list'),
        ({"batches": []}, "a word or a list with a value per rank"),
        ({"batches": [3, 4], "global_batch": 8}, r"\[3, 4\] sum to 7, not to the global batch 8"),
        ({"batches": [-1, 9], "global_batch": 8}, "must not be negative"),
        ({"batches": [1.0, math.nan]}, "ratios must be finite and not negative"),
        ({"batches": [0.0, 0.0]}, "ratios must sum to a finite number above 0"),
        ({"batches": [1e308, 1e308]}, "ratios must sum to a finite number above 0"),
        ({"batches": [0.5, "1"]}, "batches has '1', which is not a number"),
        ({"batches": {48, 16}}, "a word or a list"),
        ({"compression": "zip"}, "compression must be one of none, fp16, bf16"),
        ({"compression_warmup": -1}, "compression_warmup must be an int of at least 0, not -1"),
        ({"guard_every": 1.5}, "guard_every must be an int of at least 0, not 1.5"),
        ({"hierarchy": "hosts"}, 'hierarchy must be "auto", "off" or a list of islands'),
        ({"hierarchy": []}, "hierarchy must be .* a list of islands"),
        ({"hierarchy": [0, 1]}, "hierarchy must be .* each a list of ranks"),
        ({"hierarchy": [[0], []]}, "hierarchy must be .* each a list of ranks"),
        ({"hierarchy": [[0, True]]}, "hierarchy must be .* each a list of ranks"),
        ({"tf32": 1}, "tf32 must be True or False, not 1"),
        ({"global_batch": 0}, "global_batch must be an int of at least 1, not 0"),
        ({"global_batch": 2**63}, "global_batch must be an int"),
        ({"global_batch": True}, "global_batch must be an int of at least 1, not True"),
        ({"micro_batch": 0}, "micro_batch must be an int of at least 1"),
        ({"bucket_bytes": 10}, "bucket_bytes must be an int of at least 1024"),
        ({"lr": 0}, "lr must be a finite number above 0"),
        ({"lr": "half"}, 'lr must be a number above 0 or a factor such as "x0.5"'),
        ({"lr": "x1e999"}, "lr must be a number above 0 or a factor"),
        ({"lr_rule": "cubic"}, "lr_rule must be one of none, linear, sqrt, not 'cubic'"),
        ({"sync_every": 0}, "sync_every must be an int of at least 1, not 0"),
        ({"outer_momentum": 1.0}, "outer_momentum must be a number from 0 to below 1, not 1.0"),
        ({"outer_momentum": None}, "outer_momentum must be a number from 0 to below 1"),
        ({"clip_norm": math.inf}, "clip_norm must be a finite number above 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.SettingsError, match=said):
        Settings(**wrong)


def test_the_ranks_are_checked_when_they_are_known() -> None:
    Settings(batches=[48, 16], global_batch=64, amp=["bf16", "fp16"]).check_ranks(2)
    with pytest.raises(hk.SettingsError, match="batches has 2 values for 3 devices"):
        Settings(batches=[48, 16], global_batch=64).check_ranks(3)
    with pytest.raises(hk.SettingsError, match="amp has 1 values for 2 devices"):
        Settings(amp=["bf16"]).check_ranks(2)
    with pytest.raises(hk.SettingsError, match=r"global_batch 2 is smaller than .* devices, 4"):
        Settings(global_batch=2).check_ranks(4)


def test_each_rank_is_in_one_island() -> None:
    settings = Settings(hierarchy=[np.array([2, 0]), [1]])
    assert settings.hierarchy == ((2, 0), (1,))
    settings.check_ranks(3)
    for wrong in ([[0, 1], [1, 2]], [[0], [2]], [[0, 1, 2, 3]]):
        with pytest.raises(hk.SettingsError, match="each of the ranks 0 to 2 in one island"):
            Settings(hierarchy=wrong).check_ranks(3)


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_a_factor_is_read_back(factor: float) -> None:
    assert lr_factor(f"x{factor}") == factor
    assert lr_factor(factor) is None


def test_every_field_says_what_it_means_and_when_it_takes_effect() -> None:
    for field in dataclasses.fields(Settings):
        assert field.metadata["meaning"]
        assert field.metadata["effect"] in ("next grant", "next epoch")
        assert f"{field.name}:" in (Settings.__doc__ or "")


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_frozen(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Settings(), name, None)
