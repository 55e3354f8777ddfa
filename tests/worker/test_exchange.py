"""The comm hook and its engine, between two real ranks over gloo."""

import functools
import math
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.plain import Plain
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.emulated_link import EmulatedLink
from hetkit.worker.exchange import Exchange
from hetkit.worker.group import is_peer_loss

WIDTH = 64


class Ramp(torch.nn.Module):
    """Its gradient is known: of the weights of layer k, k + 1 per element, times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum((k + 1) * layer.sum() for k, layer in enumerate(self.layers))


@pytest.fixture(scope="module")
def ranks(_whole_run: Any):
    """Two ranks of a session that train something else; calls run between its steps."""
    task = hk.Task(
        model=lambda: torch.nn.Linear(2, 1),
        data=torch.ones(8, 2),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with hk.Session(task, devices="cpu*2", global_batch=4) as session:
        session.run(epochs=1)
        session.wait(60.0)
        yield session


def hooked(exchange: Exchange) -> torch.nn.parallel.DistributedDataParallel:
    ddp = torch.nn.parallel.DistributedDataParallel(
        Ramp(), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20, gradient_as_bucket_view=True
    )
    exchange.attach(ddp)
    return ddp


def backward(ddp: torch.nn.Module, value: float) -> list[float]:
    ddp.zero_grad()
    ddp(torch.tensor(value)).backward()
    return [float(p.grad[0, 0]) for p in ddp.parameters()]


def sums(worker: Any) -> list[list[float]]:
    exchange = Exchange(torch.distributed.new_group(), None, make_codec("none"))
    try:
        ddp = hooked(exchange)
        found = []
        for name, inverse_scale in (("none", 1.0), ("fp16", 1.0), ("bf16", 0.5), ("none", 0.25)):
            exchange.begin_step()
            exchange.codec, exchange.inverse_scale = make_codec(name), inverse_scale
            found.append([*backward(ddp, worker.rank + 1.0), exchange.wire_bytes])
        return found
    finally:
        exchange.close()


def test_the_hook_sums_and_unscales_and_its_codec_can_be_changed_between_steps(ranks):
    first, second = ranks.call(sums)
    assert first == second, "bit-equal"
    raw = 6 * WIDTH * WIDTH * 4
    expected = [(1, raw), (1, raw / 2), (0.5, raw / 2), (0.25, raw)]
    for found, (factor, sent) in zip(first, expected, strict=True):
        assert found == [*(3.0 * factor * (k + 1) for k in range(6)), sent]


def account(worker: Any) -> dict[str, Any]:
    shares: list[float] = []
    exchange = Exchange(
        torch.distributed.new_group(), None, make_codec("fp16"), bucket_ready=shares.append
    )
    try:
        ddp = hooked(exchange)
        for _ in range(3):
            shares.clear()
            exchange.begin_step()
            backward(ddp, 1.0)
        return {
            "shares": list(shares),
            "buckets": list(exchange.bucket_bytes),
            "cut": exchange.cut,
            "spans": exchange.collectives,
            "codec_s": exchange.codec_s(),
        }
    finally:
        exchange.close()


def test_the_account_of_a_step_is_one_of_its_buckets_in_hand_over_order(ranks):
    for found in ranks.call(account):
        buckets = len(found["buckets"])
        assert buckets > 1
        assert sum(found["buckets"]) == 6 * WIDTH * WIDTH * 4
        assert len(found["spans"]) == len(found["shares"]) == buckets
        assert found["shares"] == sorted(found["shares"])
        assert found["shares"][-1] == 1.0
        edges = [edge for span in found["spans"] for edge in span]
        assert edges == sorted(edges), "one collective after the other"
        assert found["spans"][-1][1] >= found["cut"]
        assert found["codec_s"] > 0, "the last bucket is cast after the cut"


class Broken(Codec):
    name = "broken"

    def exchange(self, bucket: Any, wire: Any) -> None:
        raise ZeroDivisionError("a codec with a bug")

    def wire_bytes(self, pieces: Any, element_bytes: int, world_size: int) -> float:
        return 0.0


def break_codec(worker: Any) -> tuple[str, str, bool]:
    exchange = Exchange(torch.distributed.new_group(), None, Broken())
    try:
        ddp = hooked(exchange)
        try:
            backward(ddp, 1.0)
        except RuntimeError as error:
            said = str(error)
        return said, type(exchange.error).__name__, is_peer_loss(exchange.error)
    finally:
        exchange.close()


def test_an_error_in_the_engine_reaches_the_main_thread_as_this_ranks_own(ranks):
    for said, kind, victim in ranks.call(break_codec):
        assert "a codec with a bug" in said
        assert (kind, victim) == ("ZeroDivisionError", False)


class ByTheEngine(Plain):
    as_it_is = False


def both_ways(worker: Any) -> tuple[list[list[float]], list[int]]:
    found, spans = [], []
    for codec in (make_codec("none"), ByTheEngine()):
        exchange = Exchange(torch.distributed.new_group(), None, codec)
        try:
            ddp = hooked(exchange)
            for _ in range(2):
                exchange.begin_step()
                found.append([*backward(ddp, worker.rank + 1.0), exchange.wire_bytes])
            spans.append(len(exchange.collectives))
            assert exchange.all_finite()
            assert all(end > start for start, end in exchange.collectives)
            backward(ddp, math.inf)
            assert not exchange.all_finite()
        finally:
            exchange.close()
    return found, spans


def test_a_sum_that_the_hook_starts_is_the_engines_sum(ranks):
    first, second = ranks.call(both_ways)
    assert first == second
    found, spans = first
    assert all(each == found[0] for each in found)
    assert spans[0] == spans[1] > 1


class Names(Codec):
    """Notes what lies where, and checks it against what the gradients are."""

    name = "names"

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.wrong: list[str] = []
        self.settled: list[bool] = []

    def exchange(self, bucket: Bucket, wire: Any) -> None:
        self.seen.append(tuple(piece.name for piece in bucket.pieces))
        for piece in bucket.pieces:
            layer = float(piece.name.removeprefix("layers."))
            if not torch.equal(bucket.view(piece), torch.full((WIDTH * WIDTH,), layer + 1)):
                self.wrong.append(piece.name)
        wire.all_reduce(bucket.flat)

    def settle(self, good: bool) -> None:
        self.settled.append(good)

    def wire_bytes(self, pieces: Any, element_bytes: int, world_size: int) -> float:
        return 0.0


def named(worker: Any, buckets: float) -> tuple[list[tuple[str, ...]], list[str]]:
    codec = Names()
    exchange = Exchange(torch.distributed.new_group(), None, codec)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(
            Ramp(), bucket_cap_mb=buckets * WIDTH * WIDTH * 4 / 2**20, gradient_as_bucket_view=True
        )
        exchange.attach(ddp)
        for step in range(3):
            exchange.begin_step(step)
            backward(ddp, 1.0)
        return codec.seen, codec.wrong
    finally:
        exchange.close()


@pytest.mark.parametrize("buckets", [2, 100])
def test_a_codec_is_told_each_parameters_place_also_when_ddp_fills_its_buckets_anew(ranks, buckets):
    first, second = ranks.call(functools.partial(named, buckets=buckets))
    assert first == second
    seen, wrong = first
    assert not wrong
    names = [name for bucket in seen for name in bucket]
    for step in range(3):
        in_step = names[6 * step :][:6]
        assert sorted(in_step) == [f"layers.{k}" for k in range(6)], "each parameter once a step"


def guarded(worker: Any) -> list[tuple[tuple[float, float] | None, float]]:
    exchange = Exchange(torch.distributed.new_group(), None, make_codec("bf16"))
    try:
        ddp = hooked(exchange)
        exchange.guard.every = 2
        found = []
        for step, slope in enumerate((1.001, 1.001, math.inf, 1.001)):
            exchange.begin_step(step)
            backward(ddp, slope)
            exchange.settle(exchange.all_finite())
            found.append((exchange.reading, exchange.wire_bytes))
        return found
    finally:
        exchange.close()


def test_the_guard_has_the_gradient_travel_twice_and_tells_the_difference(ranks):
    first, second = ranks.call(guarded)
    assert first == second
    raw = 6 * WIDTH * WIDTH * 4
    assert [sent for _, sent in first] == [raw * 1.5, raw / 2, raw * 1.5, raw * 1.5]
    readings = [reading for reading, _ in first]
    assert readings[1] is None
    assert readings[2] is None, "an overflow tells nothing: the next step is looked at"
    for cosine, error in (readings[0], readings[3]):
        assert cosine == pytest.approx(1.0, abs=1e-4)
        assert 1e-4 < error < 2**-8


def slow_link(worker: Any) -> list[tuple[float, float]]:
    from hetkit.devices.device import Link

    rate = WIDTH * WIDTH * 4 / 0.03  # a bucket of one layer takes 30 ms at least
    link = EmulatedLink(Link(bytes_per_s=rate), 2, 1.0)
    exchange = Exchange(torch.distributed.new_group(), link, make_codec("none"))
    try:
        ddp = hooked(exchange)
        backward(ddp, 1.0)
        exchange.begin_step()
        backward(ddp, 1.0)
        return list(exchange.collectives)
    finally:
        exchange.close()


def test_buckets_pass_an_emulated_link_one_after_the_other(ranks):
    for spans in ranks.call(slow_link):
        assert spans[-1][1] - spans[0][0] >= 6 * 0.03 - 1e-3
        assert all(end - start >= 0.029 for start, end in spans)
