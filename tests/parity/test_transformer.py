"""A character transformer on CPython's own text, its loss a mean over characters that are there."""

import math
import pydoc_data.topics
from typing import Any

import numpy as np
import torch
from plain import SEED, Plain
from torch.nn import functional as F

import hetkit as hk

LINES, LONGEST, WIDTH = 192, 48, 32
GLOBAL_BATCH, EPOCHS, LIMIT_S = 32, 3, 120.0


def lines() -> list[torch.Tensor]:
    """Lines of the language reference, as character numbers; 0 is padding."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    kept = [line.strip() for line in text.splitlines() if len(line.strip()) > 1]
    step = len(kept) // LINES
    chosen = [line[:LONGEST] for line in kept[: step * LINES : step]]
    return [torch.tensor([min(ord(letter), 127) for letter in line]) for line in chosen]


def padded(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


class Transformer(torch.nn.Module):
    """One causal block."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(128, WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH))
        self.block = torch.nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = torch.nn.Linear(WIDTH, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        length = letters.shape[1]
        hidden = self.letters(letters) + self.places[:length]
        ahead = torch.nn.Transformer.generate_square_subsequent_mask(length).to(hidden)
        return self.head(self.block(hidden, src_mask=ahead, is_causal=True))


def next_letter(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    given, wanted = batch[:, :-1], batch[:, 1:]
    there = wanted != 0
    return F.cross_entropy(model(given)[there], wanted[there]), there.sum()


def test_three_unequal_ranks_learn_to_write_on_the_curve_of_one_process():
    task = hk.Task(
        model=Transformer,
        data=lines(),
        collate=padded,
        loss=next_letter,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    lengths = {len(line) for line in task.data}
    assert max(lengths) > 4 * min(lengths), "unequal counts are the point"
    plain = Plain(task)
    with hk.Session(
        task, devices="cpu*3", global_batch=GLOBAL_BATCH, seed=SEED, batches=[5.0, 1.0, 2.3]
    ) as session:
        for _ in range(EPOCHS):
            session.run(epochs=1)
            session.wait(LIMIT_S)
            plain.train(session.plan)
        curve = session.history.series("loss")[1]
    np.testing.assert_allclose(curve, plain.losses, rtol=1e-5)
    assert curve[-1] < 0.8 * curve[0] < 0.8 * 1.2 * math.log(128)
