import pytest

import hetkit as hk
from hetkit.worker.own.clock import OwnClock


def test_the_time_per_sample_is_agreed_from_the_slowest_rank():
    (device,) = hk.emulate("V100", pace={"V100": 1.0})
    clock = OwnClock(device, 0, share=8)
    clock.begin_step(0)
    clock.end_pass(8, "off")
    assert clock.fact > 0
    assert clock.real_s is None
    clock.agree([clock.fact, 1e-9], "off")
    assert clock.fact == 0.0
    assert clock.real_s is not None


def test_a_rank_without_samples_takes_the_others_word():
    (device,) = hk.emulate("V100", pace={"V100": 1.0})
    clock = OwnClock(device, 0, share=8)
    clock.begin_step(0)
    assert clock.fact == 0.0
    clock.agree([0.0, 1e-9], "off")
    assert clock.real_s == pytest.approx(0.0, abs=0.1)


def test_a_stated_time_per_sample_needs_no_agreement():
    (device,) = hk.emulate("V100", pace={"V100": 1.0}, sample_s=1e-6)
    clock = OwnClock(device, 0, share=8)
    clock.begin_step(0)
    clock.end_pass(8, "off")
    assert clock.fact == 0.0
    assert not clock.outpaced
