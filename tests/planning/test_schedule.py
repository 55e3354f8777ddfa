from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.devices.device import Device, Emulation, Link
from hetkit.errors import SettingsError
from hetkit.planning.schedule import (
    Position,
    describe_changes,
    epoch_steps,
    make_plan,
    resolve_amp,
    resolve_batches,
    resolve_islands,
)
from hetkit.settings import Settings

START = Position(epoch=0, step=0, epoch_first_step=0, samples=1000)


def device(index: int = 0, **amp_pace: float) -> Device:
    emulation = Emulation(amp_pace=amp_pace)
    return Device(name="card", kind="cpu", index=index, key=f"e:{index}", emulation=emulation)


def on_hosts(hosts: str, inter_bytes_per_s: float) -> list[Device]:
    """A device for each letter, which names its host; inside a host the link has 80 GB/s."""
    links = Emulation(
        intra_link=Link(bytes_per_s=80e9), inter_link=Link(bytes_per_s=inter_bytes_per_s)
    )
    return [replace(device(place), host=host, emulation=links) for place, host in enumerate(hosts)]


def plan(settings: Settings, **more):
    return make_plan(
        settings, [device(0), device(1)], START, **{"version": 1, "reason": "why", **more}
    )


@given(samples=st.integers(1, 10_000), batch=st.integers(1, 3_000))
def test_an_epoch_has_steps_for_every_sample_and_none_to_spare(samples, batch):
    steps = epoch_steps(samples, batch)
    assert (steps - 1) * batch < samples <= steps * batch


@given(
    world_size=st.integers(1, 6),
    extra=st.integers(0, 500),
    data=st.data(),
)
def test_batches_sum_to_the_global_batch_in_every_form(world_size, extra, data):
    total = world_size + extra
    ratios = data.draw(st.lists(st.floats(0.1, 9.0), min_size=world_size, max_size=world_size))
    balanced = data.draw(st.lists(st.integers(1, 99), min_size=world_size, max_size=world_size))
    for batches in ("auto", "even", ratios):
        settings = Settings(global_batch=total, batches=batches)
        assert sum(resolve_batches(settings, world_size, None)) == total
        assert sum(resolve_batches(settings, world_size, balanced)) == total


def test_the_balancers_split_is_for_auto_only_and_is_rescaled_to_a_new_global_batch():
    balanced = (30, 10)
    assert resolve_batches(Settings(global_batch=40), 2, balanced) == (30, 10)
    assert resolve_batches(Settings(global_batch=80), 2, balanced) == (60, 20)
    assert resolve_batches(Settings(global_batch=40, batches="even"), 2, balanced) == (20, 20)
    explicit = Settings(global_batch=40, batches=[39, 1])
    assert resolve_batches(explicit, 2, balanced) == (39, 1)


def test_auto_gives_each_device_the_best_precision_that_it_has():
    devices = [device(0, bf16=2.0, fp16=2.0), device(1, fp16=2.0), device(2)]
    assert resolve_amp(Settings(amp="auto"), devices) == ("bf16", "fp16", "off")
    assert resolve_amp(Settings(amp=["bf16", "off", "off"]), devices) == ("bf16", "off", "off")


def test_a_precision_that_a_device_lacks_names_the_device_and_what_it_takes():
    with pytest.raises(SettingsError, match=r"card #1.*'bf16'.*'off', 'auto', 'fp16'"):
        resolve_amp(Settings(amp="bf16"), [device(0, bf16=2.0), device(1, fp16=2.0)])


def test_micro_batches_are_the_least_of_what_is_asked_for_and_what_fits():
    settings = Settings(global_batch=64, micro_batch=16)
    assert plan(settings).micro_batches == (16, 16)
    assert plan(settings, micro_caps=[None, 5]).micro_batches == (16, 5)
    assert plan(Settings(global_batch=64), micro_caps=[None, 5]).micro_batches == (64, 5)
    assert plan(settings, micro_caps=[0, 5]).micro_batches == (1, 5)


def test_the_learning_rate_is_a_number_or_a_factor():
    by = {lr: plan(Settings(lr=lr)) for lr in (None, 0.1, 1, "x0.5")}
    assert [(p.lr, p.lr_factor) for p in by.values()] == [
        (None, None),
        (0.1, None),
        (1.0, None),
        (None, 0.5),
    ]


def test_a_list_of_another_length_is_refused():
    with pytest.raises(SettingsError, match="batches has 3 values for 2 devices"):
        plan(Settings(global_batch=6, batches=[1, 2, 3]))


def test_the_first_epochs_travel_uncompressed():
    settings = hk.Settings(global_batch=64, compression="int8", compression_warmup=2)
    places = [Position(epoch=e, step=9 * e, epoch_first_step=9 * e, samples=9) for e in range(4)]
    plans = [make_plan(settings, [device(0)], at, version=1, reason="") for at in places]
    assert [each.compression for each in plans] == ["none", "none", "int8", "int8"]


@pytest.mark.parametrize(
    ("hosts", "hierarchy", "islands"),
    [
        ("aabb", "auto", ((0, 1), (2, 3))),
        ("abca", "auto", ((0, 3), (1,), (2,))),
        ("aaaa", "auto", ()),
        ("abcd", "auto", ()),
        ("aabb", "off", ()),
        ("aaaa", [[3, 1], [0, 2]], ((3, 1), (0, 2))),
        ("aabb", [[0, 1, 2, 3]], ()),
        ("aabb", [[0], [1], [2], [3]], ()),
    ],
)
def test_islands_are_the_hosts_or_those_given_where_they_save_a_message(hosts, hierarchy, islands):
    assert resolve_islands(Settings(hierarchy=hierarchy), on_hosts(hosts, 1e9)) == islands


@pytest.mark.parametrize(("inter", "islands"), [(80e9, ()), (1e9, ((0, 1), (2, 3)))])
def test_hosts_are_no_islands_where_the_links_between_are_as_fast(inter, islands):
    assert resolve_islands(Settings(), on_hosts("aabb", inter)) == islands


@pytest.mark.parametrize(
    ("compression", "islands"),
    [
        ("none", ((0, 1, 2), (3, 4, 5))),
        ("fp16", ((0, 1, 2), (3, 4, 5))),
        ("topk(ratio=0.01)", ()),
        ("task:mine", ((0, 1, 2), (3, 4, 5))),
    ],
)
def test_a_codec_that_sends_little_needs_no_islands(compression, islands):
    settings = Settings(compression=compression)
    assert resolve_islands(settings, on_hosts("aaabbb", 10e9)) == islands


def test_changes_are_named_with_both_values():
    before = Settings()
    assert describe_changes(None, before) == ()
    assert describe_changes(before, before) == ()
    after = before.change(batches=[200, 56], lr="x0.5")
    assert describe_changes(before, after) == ("batches: auto → [200, 56]", "lr: None → x0.5")


def test_a_plan_carries_every_setting_that_a_worker_obeys():
    settings = hk.Settings(
        global_batch=64, clip_norm=2.0, bucket_bytes=2048, compression="fp16", tf32=True
    )
    made = plan(settings)
    for name in ("global_batch", "clip_norm", "bucket_bytes", "compression", "tf32"):
        assert getattr(made, name) == getattr(settings, name)
    assert (made.epoch_steps, made.last_step, made.reason) == (16, 15, "why")
