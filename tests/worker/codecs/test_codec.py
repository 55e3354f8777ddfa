"""A third party's codec: one class, given to the task, trains."""

import pytest
import torch

import hetkit as hk
from hetkit.worker.codecs.codec import Codec

LIMIT_S = 60.0


class Signs(Codec):
    """One byte an element: its sign, and the bucket's mean size beside it."""

    name = "signs"

    def exchange(self, bucket, wire):
        size = bucket.flat.abs().mean().reshape(1)
        signs = bucket.flat.sign().to(torch.int8)
        wire.all_reduce(signs)
        wire.all_reduce(size)
        bucket.flat.copy_(signs * size / wire.world_size)

    def wire_bytes(self, pieces, element_bytes, world_size):
        elements = sum(piece.numel for piece in pieces)
        return 2 * (world_size - 1) / world_size * (elements + element_bytes)


def make_task(**more) -> hk.Task:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(64, 8, generator=generator)
    return hk.Task(
        model=lambda: torch.nn.Linear(8, 1),
        data=(points, points.sum(1, keepdim=True)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **more,
    )


def test_a_codec_of_ones_own_trains():
    task = make_task(codecs={"signs": Signs})
    with hk.Session(
        task, devices="cpu*2", global_batch=16, compression="task:signs", batches="even"
    ) as session:
        session.run(epochs=12)
        session.wait(LIMIT_S)
        losses = [row.loss for row in session.ledger]
        assert losses[-1] < 0.2 * losses[0]
        # 9 gradients, a byte each, and one float32.
        assert session.ledger[-1].wire_bytes == pytest.approx(13)


def test_a_codec_that_the_task_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(hk.SettingsError, match=r"no codec 'mine': it has 'signs'"):
        hk.Session(make_task(codecs={"signs": Signs}), devices="cpu*2", compression="task:mine")
    with pytest.raises(hk.SettingsError, match="it has none"):
        hk.Session(make_task(), devices="cpu*2", compression="task:mine")
    with pytest.raises(hk.SettingsError, match="it has none"):
        hk.Session(lambda worker: None, devices="cpu*2", compression="task:mine")


@pytest.mark.parametrize(
    ("codecs", "error"),
    [([Signs], hk.TaskError), ({"signs": 3}, hk.TaskError), ({"a b": Signs}, hk.SettingsError)],
)
def test_what_makes_no_codec_is_refused(codecs, error):
    with pytest.raises(error):
        make_task(codecs=codecs)
