"""Two halves: what is kept between steps, and what is not compressed."""

import pytest
import torch

from hetkit.worker.codecs.message import Message
from hetkit.worker.codecs.registry import make_codec


def test_work_of_an_earlier_layout_is_let_go(group):
    ranks = group(lambda: make_codec("int8(small_bytes=0)"), 2)
    flats = [torch.ones(600), torch.ones(600)]
    for shapes in ([("a", (600,))], [("a", (300,)), ("b", (300,))], [("b", (300,)), ("a", (300,))]):
        for _ in range(2):
            ranks.step(flats, shapes)
            assert len(ranks.codecs[0]._works) == 1
    for codec in ranks.codecs:
        codec.settle(True)  # a step without an exchange
    assert len(ranks.codecs[0]._works) == 1


@pytest.mark.parametrize("text", ["int8", "int4", "topk", "threshold", "powersgd"])
def test_biases_and_small_parameters_arrive_as_they_are(group, text):
    shapes = [("norm", (500,)), ("w", (50, 60)), ("small", (10, 20)), ("bias", (7,))]
    generator = torch.Generator().manual_seed(0)
    flats = [torch.randn(3707, generator=generator) for _ in range(2)]
    got = group(lambda: make_codec(text), 2).step(flats, shapes)
    exact = flats[0] + flats[1]
    assert torch.equal(got[:500], exact[:500])
    assert torch.equal(got[3500:], exact[3500:])
    assert not torch.equal(got[500:3500], exact[500:3500])


@pytest.mark.parametrize("text", ["int8", "int4", "topk", "threshold", "powersgd"])
def test_one_rank_alone_keeps_its_gradient(group, text):
    flat = torch.randn(3000)
    assert torch.equal(group(lambda: make_codec(text), 1).step([flat], [("w", (50, 60))]), flat)


def test_the_parts_of_a_message_are_aligned_and_apart():
    parts = [(1, torch.bfloat16), (3, torch.float64), (5, torch.int8), (2, torch.float32)]
    message = Message(3, parts, torch.device("cpu"))
    for number, part in enumerate(message.parts):
        part.fill_(number + 1)
    for number, (part, (count, dtype)) in enumerate(zip(message.parts, parts, strict=True)):
        assert part.dtype == dtype
        assert part.tolist() == [[number + 1] * count] * 3
