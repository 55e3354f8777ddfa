"""Islands between four real ranks over gloo: who talks to whom, and what all end with."""

import functools
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.devices.device import Device
from hetkit.planning.exchange_time import ring_bytes
from hetkit.worker.codecs.bucket import Bucket, Piece
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.plain import Plain
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.hierarchy import Archipelago, Hierarchical
from hetkit.worker.wire import GroupWire

RANKS = 4
SHAPE = (40, 50)
ISLANDS = [
    ((0, 1), (2, 3)),
    ((0,), (1, 2, 3)),
    ((3, 1), (0, 2)),  # the first named leads, whatever its rank
    ((2, 3, 0), (1,)),
]


@pytest.fixture(scope="module")
def ranks(_whole_run: Any):
    """Four ranks of a session that train something else; calls run between its steps."""
    task = hk.Task(
        model=lambda: torch.nn.Linear(2, 1),
        data=torch.ones(8, 2),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with hk.Session(task, devices=f"cpu*{RANKS}", global_batch=4) as session:
        session.run(epochs=1)
        session.wait(60.0)
        yield session


class Counted(Plain):
    """Says how often it was asked to exchange, over how many ranks."""

    def __init__(self) -> None:
        self.over: list[int] = []

    def exchange(self, bucket: Any, wire: Any) -> None:
        self.over.append(wire.world_size)
        super().exchange(bucket, wire)


def gradient(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).flatten().to(dtype)


def devices() -> list[Device]:
    return [Device(name="cpu", kind="cpu", index=i, key=f"cpu:{i}") for i in range(RANKS)]


def exchanged(worker: Any, islands: Any, make: Any, spoil: int | None = None) -> Any:
    """One exchange; returns the sum, the codec and the number of collectives on the flat wire."""
    codec = Archipelago(devices(), worker.rank).over(make, islands)
    wire = GroupWire(torch.distributed.new_group(), None)
    flat = gradient(worker.rank)
    if worker.rank == spoil:
        flat[7] = float("inf")
    codec.exchange(Bucket.of(flat, [("w", SHAPE)]), wire)
    over = codec._codec.over if isinstance(codec, Hierarchical) else codec.over
    return flat, over, len(wire.collectives)


@pytest.mark.parametrize("islands", ISLANDS, ids=str)
def test_all_ranks_end_with_the_flat_sum_to_the_bit_of_each_other(ranks, islands):
    found = ranks.call(functools.partial(exchanged, islands=islands, make=Counted))
    expected = sum(gradient(rank) for rank in range(RANKS))
    for flat, _, collectives in found:
        assert torch.equal(flat, found[0][0])
        assert (flat - expected).abs().max() <= 1e-15 * expected.abs().max()
        assert collectives == 1, "as many on every rank, or the time split could not match them"


@pytest.mark.parametrize("islands", ISLANDS, ids=str)
def test_the_codec_runs_between_the_leaders_alone(ranks, islands):
    found = ranks.call(functools.partial(exchanged, islands=islands, make=Counted))
    leaders = {island[0] for island in islands}
    for rank, (_, over, _) in enumerate(found):
        assert over == ([len(leaders)] if rank in leaders else [])


def test_no_islands_are_the_codec_itself(ranks):
    for _, over, collectives in ranks.call(functools.partial(exchanged, islands=(), make=Counted)):
        assert (over, collectives) == ([RANKS], 1)


@pytest.mark.parametrize("spoil", range(RANKS))
def test_what_is_not_finite_on_one_rank_is_so_on_all(ranks, spoil):
    found = ranks.call(functools.partial(exchanged, islands=ISLANDS[1], make=Counted, spoil=spoil))
    assert all(not flat.isfinite().all() for flat, _, _ in found)


def coded(worker: Any, compression: str, rounds: int) -> list[torch.Tensor]:
    codec = Archipelago(devices(), worker.rank).over(
        lambda: make_codec(compression), ((0,), (1, 2, 3))
    )
    wire = GroupWire(torch.distributed.new_group(), None)
    sums = []
    for _ in range(rounds):
        flat = gradient(worker.rank, torch.float32)
        codec.exchange(Bucket.of(flat, [("w", SHAPE)]), wire)
        codec.settle(good=True)
        sums.append(flat)
    return [torch.stack(sums), torch.tensor(codec.residual_norm() or 0.0)]


def test_error_feedback_between_islands_makes_up_for_what_did_not_travel(ranks):
    rounds = 12
    found = ranks.call(functools.partial(coded, compression="topk(ratio=0.2)", rounds=rounds))
    expected = sum(gradient(rank) for rank in range(RANKS))
    error = [(found[0][0][:n].double().mean(0) - expected).norm() for n in (1, rounds)]
    assert error[1] < 0.4 * error[0], "what is left of one step comes in the next ones"
    for sums, _ in found:
        assert torch.equal(sums, found[0][0])
    assert [float(residual) > 0 for _, residual in found] == [True, True, False, False]


def test_bytes_are_the_sums_inside_the_codecs_outside_and_the_spread():
    class Named:
        def __init__(self, world_size: int) -> None:
            self.world_size = world_size

    pieces, raw = [Piece("w", 0, SHAPE)], 2000 * 4
    codec: Codec = make_codec("fp16")
    outside = ring_bytes(2, raw / 2)
    inside = ring_bytes(3, raw) + 2 / 3 * raw
    islands = ((0,), (1, 2, 3))
    alone = Hierarchical(codec, None, Named(2), islands, 0)
    leader = Hierarchical(codec, Named(3), Named(2), islands, 0)
    other = Hierarchical(codec, Named(3), None, islands, 0)
    sent = [each.wire_bytes(pieces, 4, RANKS) for each in (alone, leader, other)]
    assert sent == pytest.approx([outside, inside + outside, inside])


@pytest.mark.parametrize(("built_with_nccl", "backend"), [(True, "nccl"), (False, "gloo")])
def test_cards_of_one_vendor_speak_its_library(monkeypatch, built_with_nccl, backend):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built_with_nccl)
    cards = [Device(name="x", kind="cuda", index=i, key=str(i)) for i in range(2)]
    cpu = Device(name="cpu", kind="cpu", index=0, key="cpu:0")
    islands = Archipelago([*cards, cpu], 0)
    assert islands._backend((0, 1)) == backend
    assert islands._backend((0, 2)) == "gloo", "a leader on a card and one on none"
