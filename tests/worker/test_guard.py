import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.worker.guard import Guard


def test_it_looks_at_the_first_exchange_and_then_every_so_many_steps():
    guard = Guard()
    guard.every = 3
    looked = []
    for step in range(10, 20):
        guard.begin_step(step)
        if step == 11:
            continue  # with local steps, nothing travels in some
        if guard.looks:
            looked.append(step)
            guard.compare(torch.ones(2), torch.ones(2))
        guard.settle()
    assert looked == [10, 13, 16, 19]
    guard.restart()
    guard.begin_step(20)
    assert guard.looks
    guard.every = 0
    assert not guard.looks


def test_a_step_that_tells_nothing_is_made_up_for_by_the_next():
    guard = Guard()
    guard.every = 100
    gradients = (torch.zeros(3), torch.tensor([1.0, math.inf, 0.0]), torch.ones(3))
    for step, true in enumerate(gradients):
        guard.begin_step(step)
        assert guard.looks
        guard.compare(true.clone(), true)
        found = guard.settle()
        assert (found is None) == (step < 2)
    assert found == pytest.approx((1.0, 0.0))
    guard.begin_step(3)
    assert not guard.looks


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.integers(1, 19))
def test_cut_into_buckets_it_is_the_cosine_and_the_error_of_the_whole(values, at):
    true = torch.tensor(values, dtype=torch.float64)
    made = true.roll(1)
    guard = Guard()
    for part in (slice(None, at), slice(at, None)):
        guard.compare(made[part], true[part])
    found = guard.reading()
    if float(true.norm()) < 1e-100:
        return
    cosine = made @ true / (made.norm() * true.norm())
    error = (made - true).norm() / true.norm()
    assert found == pytest.approx((float(cosine), float(error)), abs=1e-9)


def test_a_tiny_gradient_has_a_direction_too():
    # The product of the squared norms vanished, and the division by it ended the worker.
    guard = Guard()
    tiny = torch.tensor([0.0, 5.7e-94], dtype=torch.float64)
    guard.compare(tiny.clone(), tiny)
    assert guard.reading() == pytest.approx((1.0, 0.0))
