import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.worker.randomness import (
    aside,
    generator_states,
    restore_generators,
    sample_seeds,
    seed_all,
)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@given(number=st.integers(0, 2**64 - 1))
def test_a_seed_fixes_all_three_generators(number):
    with aside():
        seed_all(number)
        first = drawn()
        seed_all(number)
        assert drawn() == first


def test_aside_restores_them_after_an_error_too():
    seed_all(7)
    states = generator_states()
    expected = drawn()
    restore_generators(states)

    def fail() -> None:
        with aside():
            seed_all(8)
            raise ValueError("the dataset's")

    with pytest.raises(ValueError, match="the dataset's"):
        fail()
    assert drawn() == expected


def test_seeds_depend_on_each_word_and_on_nothing_else():
    seeds = {
        sample_seeds(seed, epoch, [index], [repeat])[0]
        for seed in range(4)
        for epoch in range(8)
        for index in range(64)
        for repeat in range(4)
    }
    assert len(seeds) == 4 * 8 * 64 * 4
    assert sample_seeds(3, 1, [4, 9], [0, 2]) == [
        sample_seeds(3, 1, [4])[0],
        sample_seeds(3, 1, [9], [2])[0],
    ]
    assert all(0 <= seed < 2**64 for seed in sample_seeds(2**200, 10**9, range(100)))
