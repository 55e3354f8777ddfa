import random
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.records.noise import FEWEST_BLOCKS, MOST_BLOCKS, block_noise, measure_noise


def test_the_error_is_that_of_many_epochs_measured_again():
    dice = random.Random(0)
    epochs = [[dice.gauss(1.0, 0.1) for _ in range(200)] for _ in range(200)]
    truth = stdev(median(values) for values in epochs)
    told = fmean(block_noise(values, median).error for values in epochs)
    assert told == pytest.approx(truth, rel=0.15)


def test_what_neighbours_share_does_not_make_the_error_too_small():
    """Each level holds for ten steps: 200 steps know no more than 20 would."""
    dice = random.Random(1)
    values = [level for _ in range(20) for level in [dice.gauss(1.0, 0.1)] * 10]
    assert block_noise(values, fmean).error == pytest.approx(0.1 / 20**0.5, rel=0.5)


@given(values=st.lists(st.floats(0.0, 1e6), max_size=90))
def test_too_few_steps_have_no_noise(values):
    noise = block_noise(values, median)
    assert (noise is None) == (len(values) < FEWEST_BLOCKS)
    assert noise is None or (noise.blocks <= MOST_BLOCKS and noise.error >= 0)


def test_a_diverged_loss_has_none_and_the_others_have(record):
    records = [record(step, loss=float("nan")) for step in range(12)]
    noise = measure_noise(records, [each.critical for each in records], median)
    assert "loss" not in noise
    assert noise["step_s"].blocks == noise["compute_s"].blocks == 12
