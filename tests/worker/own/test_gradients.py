from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetkit.worker.own.gradients import Gradients, fill, sum_over_ranks


class AloneExchange:
    """Hands every buffer back as it is, and remembers it."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def submit(self, flat: torch.Tensor, shapes: Any) -> "torch.futures.Future[torch.Tensor]":
        self.buffers.append(flat)
        flat.mul_(2)  # as if another rank had the same
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-3, 3)), min_size=1, max_size=6),
    st.integers(1, 50),
)
def test_calls_of_one_named_mean_make_that_mean(calls, planned):
    (weight,) = parameters((1,))
    gradients = Gradients(torch.optim.SGD([weight], lr=1.0))
    total = sum(count for count, _ in calls)
    for count, slope in calls:
        gradients.enter("tokens")
        gradients.count(count, of="tokens", share=3)
        step = torch.tensor([slope * count / planned], dtype=torch.float64)
        weight.grad = step if weight.grad is None else weight.grad + step
    gradients.merge({"tokens": float(total)}, planned=planned)
    mean = sum(count * slope for count, slope in calls) / total if total else 0.0
    assert float(weight.grad) == pytest.approx(mean, abs=1e-12)


def test_means_over_samples_and_named_ones_are_kept_apart_until_they_merge():
    (weight,) = parameters((1,))
    gradients = Gradients(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.tensor([1.0], dtype=torch.float64)
    gradients.enter("tokens")
    assert weight.grad is None
    weight.grad = torch.tensor([8.0], dtype=torch.float64)
    gradients.enter("samples")
    assert float(weight.grad) == 1.0
    gradients.merge({"tokens": 16.0}, planned=4)
    assert float(weight.grad) == 1.0 + 8.0 * 4 / 16


def test_clearing_forgets_gradients_and_counts():
    (weight,) = parameters((1,))
    gradients = Gradients(torch.optim.SGD([weight], lr=1.0))
    gradients.count(4, of="samples", share=4)
    gradients.count(4, of="tokens", share=4)
    weight.grad = torch.ones(1, dtype=torch.float64)
    gradients.enter("tokens")
    gradients.clear()
    assert (gradients.passes, gradients.counts, gradients.names, gradients.missing) == (0, {}, 0, 1)


def test_a_gradient_that_another_rank_has_becomes_zero_and_one_that_none_has_stays_away():
    first, second, third = parameters((2,), (2,), (2,))
    first.grad = torch.ones(2, dtype=torch.float64)
    filled = fill([first, second, third], [True, True, False])
    assert len(filled) == 2
    assert second.grad is not None
    assert not second.grad.any()
    assert third.grad is None


def test_buckets_hold_one_type_each_and_no_more_than_their_size():
    tensors = [torch.ones(100), torch.ones(100, dtype=torch.float64), torch.ones(3, 50)]
    exchange = AloneExchange()
    named = {str(place): tensor for place, tensor in enumerate(tensors)}
    sum_over_ranks(exchange, named, bucket_bytes=900)  # type: ignore[arg-type]
    assert [(b.dtype, b.numel()) for b in exchange.buffers] == [
        (torch.float32, 100),
        (torch.float32, 150),
        (torch.float64, 100),
    ]
    assert all(bool((tensor == 2).all()) for tensor in tensors)
