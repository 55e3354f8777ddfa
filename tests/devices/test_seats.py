import pytest

import hetkit as hk
from hetkit.devices.busy import claim
from hetkit.devices.seats import Seats, choose, follow_devices
from hetkit.errors import DeviceBusyError, SettingsError


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)


@pytest.fixture
def fleet():
    return hk.emulate("A100 + 2xV100")


def test_devices_are_named_by_place_or_label_in_any_order(fleet):
    assert choose(fleet, ["V100 #2", 0, 2]) == (0, 2)
    assert choose(fleet, ()) == ()


@pytest.mark.parametrize("wanted", [[3], [-1], ["T4"], [True], [0.0], "V100 #2", 1, None])
def test_what_is_no_device_is_refused(fleet, wanted):
    with pytest.raises(SettingsError, match=r"A100 #0"):
        choose(fleet, wanted)


def test_values_per_rank_follow_their_devices():
    settings = hk.Settings(global_batch=16, batches=[10, 4, 2], amp=["bf16", "off", "fp16"])
    after = follow_devices(settings, (0, 1, 2), (0, 2))
    assert (after.batches, after.amp) == ((10.0, 2.0), ("bf16", "fp16"))
    assert follow_devices(hk.Settings(), (0, 1), (0,)) == hk.Settings()


def test_a_device_without_a_value_is_refused():
    settings = hk.Settings(global_batch=16, batches=[10, 6])
    with pytest.raises(SettingsError, match=r'device 1.*set\(batches="auto"\)'):
        follow_devices(settings, (0, 2), (0, 1, 2))
    idle = hk.Settings(global_batch=16, batches=[16, 0])
    with pytest.raises(SettingsError, match="no samples"):
        follow_devices(idle, (0, 1), (1,))


def test_claims_are_all_or_none_and_are_freed_with_the_seat(fleet):
    seats = Seats(fleet, "mine")
    with claim([fleet[2]], "other"):
        with pytest.raises(DeviceBusyError):
            seats.claim([0, 1, 2])
        assert not seats.claimed
        seats.claim([0, 1])
        seats.claim([0, 1])
    seats.places = (0,)
    seats.tidy()
    claim([fleet[1]], "other").close()
    with pytest.raises(DeviceBusyError):
        claim([fleet[0]], "other")
    seats.close()
    seats.close()
    claim([fleet[0]], "other").close()
