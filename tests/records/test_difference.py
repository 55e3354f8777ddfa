import dataclasses
import random
from statistics import fmean

import pytest

from hetkit.records.difference import compare_epochs, student_quantile
from hetkit.records.ledger import Ledger
from hetkit.records.noise import Noise, block_noise


def noisy(row, epoch, step_s, error=0.002, **given):
    noise = {"step_s": Noise(error=error, blocks=20), "loss": Noise(error=0.1, blocks=20)}
    return dataclasses.replace(row(epoch, step_s=step_s, **given), noise=noise)


def test_a_difference_beyond_the_noise_is_clear_and_one_within_it_is_not(row):
    comparison = compare_epochs(noisy(row, 0, 0.2), noisy(row, 4, 0.1, amp=("bf16", "bf16")))
    step = comparison["step_s"]
    assert step.change == pytest.approx(-0.1)
    assert step.clear is True
    assert step.low < -0.1 < step.high < 0
    assert comparison["loss"].clear is False
    assert comparison["wire_bytes"].clear is None
    text = str(comparison)
    assert text.startswith("Epoch 4 against epoch 0 (emulated): amp: off → bf16")
    assert "no clear difference" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "<table" in comparison._repr_html_()


def test_the_parts_are_the_critical_rank_s_and_metrics_have_no_interval(row):
    base = dataclasses.replace(row(0, metrics={"accuracy": 0.5}), compute_s=(0.1, 0.3))
    comparison = compare_epochs(
        dataclasses.replace(base, critical_rank=1), row(1, metrics={"accuracy": 0.75})
    )
    assert comparison["compute_s"].a == 0.3
    assert comparison["val_accuracy"].change == 0.25
    assert comparison["val_accuracy"].clear is None
    with pytest.raises(KeyError, match="'speed' is not compared; there are: "):
        comparison["speed"]


def test_the_ledger_compares_by_the_epochs_it_shows(row):
    ledger = Ledger(["A", "B"], [row(3), row(4)])
    assert (ledger.compare(3, 4).a, ledger.compare(3, 4).b) == (3, 4)
    with pytest.raises(ValueError, match="epoch 0 is not in the ledger; there are: 3, 4"):
        ledger.compare(0, 4)
    with pytest.raises(ValueError, match="none yet"):
        Ledger(["A"]).compare(0, 1)


@pytest.mark.parametrize(("freedom", "true"), [(3, 3.182), (5, 2.571), (19, 2.093), (1000, 1.962)])
def test_student_s_quantile(freedom, true):
    assert student_quantile(freedom) == pytest.approx(true, rel=0.01)


def test_epochs_that_do_not_differ_look_clear_one_time_in_twenty(row):
    dice = random.Random(2)

    def epoch(steps, sigma):
        values = [dice.gauss(0.2, sigma) for _ in range(steps)]
        base = row(0)
        noise = {"step_s": block_noise(values, fmean)}
        return dataclasses.replace(base, step_s=fmean(values), noise=noise)

    tries = 2000
    clear = sum(
        bool(compare_epochs(epoch(60, 0.02), epoch(200, 0.005))["step_s"].clear)
        for _ in range(tries)
    )
    assert 0.03 < clear / tries < 0.08
