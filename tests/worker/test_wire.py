"""The wire between three real ranks over gloo: what arrives, what is stamped, what a link holds."""

import functools
import time
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.devices.device import Link
from hetkit.planning.exchange_time import ring_bytes, ring_seconds, spread_seconds
from hetkit.worker.emulated_link import EmulatedLink
from hetkit.worker.wire import GroupWire

RANKS = 3
ELEMENTS = 6000
LINK = Link(latency_s=0.005, bytes_per_s=ELEMENTS * 4 / 0.05)
LATE_S = 0.2
LIMIT_S = 30.0
"""Far longer than any exchange here; a busy machine is late."""


@pytest.fixture(scope="module")
def ranks(_whole_run: Any):
    """Three ranks of a session that train something else; calls run between its steps."""
    task = hk.Task(
        model=lambda: torch.nn.Linear(2, 1),
        data=torch.ones(6, 2),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with hk.Session(task, devices=f"cpu*{RANKS}", global_batch=3) as session:
        session.run(epochs=1)
        session.wait(60.0)
        yield session


def rows(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Row r of rank i holds 10·i + r."""
    return (10 * rank + torch.arange(RANKS).repeat_interleave(4)).to(dtype)


def carried(worker: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    wire = GroupWire(torch.distributed.new_group(), None)
    summed, given = rows(worker.rank, dtype), rows(worker.rank, dtype)
    wire.all_reduce(summed)
    came = torch.empty_like(given)
    wire.all_to_all(came, given)
    gathered = torch.empty(RANKS * given.numel(), dtype=dtype)
    wire.all_gather(gathered, given)
    spread = given.clone()
    wire.broadcast(spread, source=2)
    assert len(wire.collectives) == 4
    starts_and_ends = [moment for span in wire.collectives for moment in span]
    assert starts_and_ends == sorted(starts_and_ends)
    return [summed, came, gathered, spread]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
)
def test_everybody_gets_what_it_should_in_every_dtype(ranks: Any, dtype: torch.dtype) -> None:
    given = [rows(rank, dtype) for rank in range(RANKS)]
    for rank, found in enumerate(ranks.call(functools.partial(carried, dtype=dtype))):
        summed, came, gathered, spread = found
        assert torch.equal(summed, given[0] + given[1] + given[2])
        assert torch.equal(came, torch.cat([each.chunk(RANKS)[rank] for each in given]))
        assert torch.equal(gathered, torch.cat(given))
        assert torch.equal(spread, given[2])


def held(worker: Any, late: int | None) -> list[tuple[float, float]]:
    """The spans of one exchange of each kind over a slow link; rank ``late`` comes late to each."""
    wire = GroupWire(torch.distributed.new_group(), EmulatedLink(LINK, RANKS, 1.0))
    whole, part = torch.ones(ELEMENTS), torch.ones(ELEMENTS // RANKS)
    came = torch.empty_like(whole)
    spans = []
    for carry in (
        lambda: wire.all_reduce(whole),
        lambda: wire.all_to_all(came, whole),
        lambda: wire.all_gather(came, part),
        lambda: wire.broadcast(whole, source=0),
    ):
        torch.distributed.barrier()
        if worker.rank == late:
            time.sleep(LATE_S)
        carry()
        spans.append(wire.collectives[-1])
    return spans


@pytest.mark.parametrize("late", [None, 1])
def test_a_link_holds_each_for_the_bytes_it_sends_after_the_last_has_come(
    ranks: Any, late: int | None
) -> None:
    found = ranks.call(functools.partial(held, late=late))
    ring_s = ring_seconds(RANKS, ring_bytes(RANKS, ELEMENTS * 4), LINK)
    expected = [ring_s, ring_s / 2, ring_s / 2, spread_seconds(RANKS, ELEMENTS * 4, LINK)]
    for spans, seconds in zip(zip(*found, strict=True), expected, strict=True):
        last_arrival = max(start for start, _ in spans)
        for start, end in spans:
            assert end - last_arrival >= seconds - 1e-3
            assert end - last_arrival < seconds + LIMIT_S
            if late is not None and start != last_arrival:
                assert last_arrival - start >= LATE_S / 2


def gathered(worker: Any) -> tuple[list[list[float]], int]:
    wire = GroupWire(torch.distributed.new_group(), EmulatedLink(Link(latency_s=60.0), RANKS, 1.0))
    values = wire.gather(torch.tensor([worker.rank, 0.1], dtype=torch.float64))
    return values.tolist(), len(wire.collectives)


def test_a_few_values_are_gathered_without_the_links_time(ranks: Any) -> None:
    expected = [[float(rank), 0.1] for rank in range(RANKS)]
    assert ranks.call(gathered) == [(expected, 1)] * RANKS


def started(worker: Any) -> tuple[list[float], list[tuple[float, float]], list[BaseException]]:
    wire, failures = GroupWire(torch.distributed.new_group(), None), []
    assert wire.immediate
    tensors = [torch.full((4,), float(worker.rank + k)) for k in range(3)]
    for future in [wire.start_all_reduce(tensor, failures.append) for tensor in tensors]:
        future.wait()
    return [float(tensor[0]) for tensor in tensors], wire.collectives, failures


def test_sums_that_were_started_are_stamped_in_the_order_of_their_start(ranks: Any) -> None:
    for sums, spans, failures in ranks.call(started):
        assert sums == [3.0, 6.0, 9.0]
        assert failures == []
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)
        assert all(end > start for start, end in spans)


def sparse(worker: Any) -> torch.Tensor:
    wire = GroupWire(torch.distributed.new_group(), EmulatedLink(Link(), RANKS, 1.0))
    rows = torch.zeros(6, 2)
    rows[worker.rank] = 1.0
    rows[5] = 1.0
    gradient = rows.to_sparse(1)
    wire.all_reduce(gradient)
    return gradient.to_dense()


def test_sparse_gradients_pass_an_emulated_link(ranks: Any) -> None:
    for summed in ranks.call(sparse):
        assert summed[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 3.0]
