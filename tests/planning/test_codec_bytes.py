"""What codecs send, by formula; that they send just that is tested with the codecs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.compression import COMPRESSIONS, Int8, PowerSGD
from hetkit.planning.codec_bytes import is_compressed, picks, segments, wire_bytes

DIGITS_MLP = [(512, 64), (512,), (512, 512), (512,), (10, 512), (10,)]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("fp16", 1.98),
        ("bf16", 1.98),
        ("int8", 3.9),
        ("int4", 7.5),
        ("topk(ratio=0.05)", 9.5),
        ("topk(ratio=0.01)", 45),
        ("threshold(ratio=0.05)", 9.5),
        ("powersgd(rank=2)", 50),
    ],
)
def test_the_digits_mlp_sends_that_much_less(text, least, world_size):
    none = wire_bytes("none", DIGITS_MLP, 4, world_size)
    assert none / wire_bytes(text, DIGITS_MLP, 4, world_size) >= least


@given(
    elements=st.integers(1, 10**7),
    world_size=st.integers(1, 64),
    most=st.sampled_from([16, 1024, 65536]),
    multiple=st.sampled_from([1, 2]),
)
def test_segments_hold_all_with_little_filling(elements, world_size, most, multiple):
    cut = segments(elements, world_size, most, multiple)
    held = world_size * cut.count * cut.length
    assert cut.length <= most
    assert cut.length % multiple == 0
    assert elements <= held < elements + world_size * (1 + cut.count * multiple)


@given(ratio=st.floats(1e-6, 1.0), length=st.integers(1, 65536))
def test_a_segment_sends_one_element_at_least_and_all_at_most(ratio, length):
    assert 1 <= picks(ratio, length) <= length
    assert picks(1.0, length) == length


@pytest.mark.parametrize("text", COMPRESSIONS)
@pytest.mark.parametrize("shapes", [[], [(0, 5)], [()], [(7,)], [(3, 5), ()]])
def test_small_buckets_send_no_more_than_they_are(text, shapes):
    for world_size in (1, 2, 5):
        assert wire_bytes(text, shapes, 4, world_size) <= wire_bytes("none", shapes, 4, world_size)


def test_small_and_flat_parameters_travel_as_they_are_unless_asked():
    assert not is_compressed(Int8(), (2000,), 4)
    assert not is_compressed(Int8(), (10, 10), 4)
    assert is_compressed(Int8(small_bytes=0), (7,), 4)
    assert not is_compressed(Int8(small_bytes=0), (0, 3), 4)
    assert not is_compressed(PowerSGD(small_bytes=0), (7,), 4)
    assert not is_compressed(PowerSGD(64), (100, 100), 4), "no factors of half the size"


def test_what_a_tasks_own_codec_sends_only_that_codec_knows():
    with pytest.raises(hk.SettingsError, match="known to that codec alone"):
        wire_bytes("task:mine", [(10, 10)], 4, 2)
