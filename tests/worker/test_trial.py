"""Tests of the trial of codecs: what it sends is what they send, and the gradient is made up."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hetkit.compression import COMPRESSIONS
from hetkit.planning.codec_bytes import wire_bytes
from hetkit.planning.exchange_time import ring_bytes
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.trial import Echo, Trial, try_codec

SHAPES = ((64, 256), (256,), (256, 128))


def bucket() -> Bucket:
    size = sum(torch.zeros(shape).numel() for shape in SHAPES)
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return Bucket.of(values, [(str(place), shape) for place, shape in enumerate(SHAPES)])


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_codec_is_tried_with_the_bytes_that_it_sends(name, world_size):
    one = bucket()
    before = one.flat.clone()
    cost = try_codec(name, [one], world_size)
    raw = ring_bytes(world_size, one.flat.numel() * 4)
    assert cost.ring_share == pytest.approx(wire_bytes(name, SHAPES, 4, world_size) / raw)
    assert cost.element_s >= 0
    assert cost.half_rounds == (4 if name == "powersgd" else 2)
    assert torch.equal(one.flat, before)


def test_an_echo_counts_an_all_reduce_as_two_halves():
    wire = Echo(3)
    values = torch.ones(6)
    wire.all_reduce(values)
    assert wire.halves == 2
    came = torch.zeros(6)
    wire.all_to_all(came, values)
    assert torch.equal(came, values)
    assert wire.halves == 3
    assert wire.seconds > 0


def test_a_trial_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [p.clone() for p in model.parameters()]
    worker = SimpleNamespace(model=model, optimizer=optimizer, world_size=1, rank=0)
    trial = Trial(compressions=("int8",), devices=(), bucket_bytes=1024, with_link=False)
    found = trial(worker)
    assert found.shapes == ((5,), (5, 30), (30, 20))
    assert set(found.costs) == {"int8"}
    assert found.transfers == ()
    elements = sum(p.numel() for p in model.parameters())
    assert found.fixed_bytes == 4 * (2 * elements - 30)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.grad is None
