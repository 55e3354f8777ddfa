"""The average of what the ranks changed, against its formula; threads play the exchange."""

import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.worker.local_steps import LocalSteps


class Hub:
    """Sums and gathers what the ranks, one thread each, hand over."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.slots: list[Any] = [None] * world_size

    def meet(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait(10)
        everyone = list(self.slots)
        self.barrier.wait(10)
        return everyone


class Played:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.world_size, self.hub, self.rank = len(hub.slots), hub, rank

    def submit(self, buffer: torch.Tensor, shapes: Any) -> Any:
        assert buffer.numel() == sum(math.prod(shape) for _, shape in shapes)
        total = torch.stack(self.hub.meet(self.rank, buffer.clone())).sum(0)
        buffer.copy_(total)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def all_finite(self) -> bool:
        return True

    def settle(self, good: bool) -> None:
        assert good

    def gather(self, values: Any) -> list[list[float]]:
        return [list(map(float, each)) for each in self.hub.meet(self.rank, values)]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3).double(), torch.nn.Linear(3, 1))
    model.register_parameter("complex", torch.nn.Parameter(torch.ones(2, dtype=torch.complex128)))
    model[1].bias.requires_grad_(False)
    return model


def play(ranks: list[list[int]], momentum: float, bucket_bytes: int | None, windows: int):
    """Each rank adds (rank + 1) × count to every parameter in each step that has a count."""
    hub = Hub(len(ranks))
    models = [make_model() for _ in ranks]
    summaries: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        local = LocalSteps(models[rank], Played(hub, rank), rank)  # type: ignore[arg-type]
        for _ in range(windows):
            local.begin()
            for step, count in enumerate(ranks[rank]):
                local.plan_step(sum(counts[step] for counts in ranks))
                if not count:
                    continue
                for p in models[rank].parameters():
                    p.data += (rank + 1) * count * p.requires_grad
                local.made_step(count)
            summaries[rank] = local.exchange(scale=2.0, good_steps=rank, bucket_bytes=bucket_bytes)
            local.apply(summaries[rank], outer_momentum=momentum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return models, summaries


def average(ranks: list[list[int]]) -> float:
    """Δ = (Σ pᵢ Hᵢ) · Σ pᵢ Δᵢ / Hᵢ, written down once more."""
    counts = [sum(counts) for counts in ranks]
    steps = [sum(count > 0 for count in counts) for counts in ranks]
    shares = [count / sum(counts) for count in counts]
    deltas = [(rank + 1) * count for rank, count in enumerate(counts)]
    mean_steps = sum(p * h for p, h in zip(shares, steps, strict=True))
    return mean_steps * sum(p * d / h for p, d, h in zip(shares, deltas, steps, strict=True) if h)


@settings(max_examples=30)
@given(
    ranks=st.integers(1, 4)
    .flatmap(
        lambda steps: st.lists(
            st.lists(st.integers(0, 9), min_size=steps, max_size=steps), min_size=1, max_size=4
        )
    )
    .filter(lambda ranks: sum(map(sum, ranks)) > 0),
    momentum=st.sampled_from([0.0, 0.5]),
    bucket_bytes=st.sampled_from([None, 1, 30]),
)
def test_the_average_is_weighted_by_samples_and_normalised_by_steps(ranks, momentum, bucket_bytes):
    models, summaries = play(ranks, momentum, bucket_bytes, windows=2)
    change = average(ranks)
    expected = change + (change + momentum * change)
    for p, start in zip(models[0].parameters(), make_model().parameters(), strict=True):
        wanted = start.detach() + (expected if p.requires_grad else 0)
        tolerance = 1e-5 if p.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(p.detach(), wanted, rtol=tolerance, atol=tolerance)
    for other in models[1:]:
        for p, q in zip(models[0].parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), "the ranks stand alike"
    assert all(summary == summaries[0] for summary in summaries)
    assert [each.good_steps for each in summaries[0]] == list(range(len(ranks)))


def test_without_any_step_nothing_moves():
    models, (summary, _) = play([[0, 0], [0, 0]], 0.5, None, windows=1)
    for p, start in zip(models[0].parameters(), make_model().parameters(), strict=True):
        assert torch.equal(p, start)
    assert [each.steps for each in summary] == [0, 0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_checkpoint_carries_the_outer_momentum_on(momentum):
    model = make_model()
    first = LocalSteps(model, None, 0)

    def window(local: LocalSteps) -> None:
        local.begin()
        local.plan_step(4)
        model[0].weight.data += 1.0
        local.made_step(4)
        local.apply(local.exchange(scale=1.0, good_steps=0), outer_momentum=momentum)

    window(first)
    before = model[0].weight.detach().clone()
    second = LocalSteps(model, None, 0)
    second.load_state_dict(first.state_dict())
    window(second)
    torch.testing.assert_close(model[0].weight.detach(), before + 1.0 + momentum)
    second.end()
    assert second.state_dict() == {}
