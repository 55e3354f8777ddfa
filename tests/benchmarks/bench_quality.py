"""What a codec does to the result: every codec at equal steps, three seeds, on two ranks.

The digits MLP (64-512-512-10) by SGD with momentum: accuracy on 360 images that were not trained
on, where one image is 0.28 points. A character transformer on CPython's own text by AdamW: loss
per character on lines that were not trained on. Printed is the mean difference from "none" of the
same seed, beside the bound. What does worse is shown as it is; codecs with error feedback are not
meant for optimizers of Adam's kind.

Run: python tests/benchmarks/bench_quality.py [digits] [characters]
"""

import pydoc_data.topics
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
from digits import digits, loss

import hetkit as hk

SEEDS = (0, 1, 2)
LIMIT_S = 300.0
CODECS = ("fp16", "bf16", "int8", "int4", "powersgd", "topk", "threshold", "topk(ratio=0.01)")
DIGITS_BOUNDS = {"fp16": -0.3, "bf16": -0.3, "int8": -0.3, "int4": -0.3, "powersgd": -0.3}
CHARACTERS_BOUNDS = {"fp16": 0.002, "bf16": 0.002, "int8": 0.002, "int4": 0.05}
LONGEST, WIDTH, LINES = 64, 64, 2048


# ── digits ──


def make_mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        *[torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()],
        torch.nn.Linear(512, 10),
    )


def accuracy(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def digits_task() -> hk.Task:
    images, labels = digits()
    tested = torch.arange(len(images)) % 5 == 0
    return hk.Task(
        model=make_mlp,
        data=(images[~tested], labels[~tested]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        validate=(images[tested], labels[tested]),
        metrics={"accuracy": accuracy},
    )


# ── characters ──


def lines() -> torch.Tensor:
    """Lines of the language reference, as character numbers; 0 is padding."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    kept = [line.strip()[:LONGEST] for line in text.splitlines() if len(line.strip()) > 20]
    rows = [torch.tensor([min(ord(letter), 127) for letter in line]) for line in kept[:LINES]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Transformer(torch.nn.Module):
    """Two causal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(128, WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH))
        block = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        length = letters.shape[1]
        hidden = self.letters(letters) + self.places[:length]
        ahead = torch.nn.Transformer.generate_square_subsequent_mask(length).to(hidden)
        return self.head(self.blocks(hidden, mask=ahead, is_causal=True))


def next_letter(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    given, wanted = batch[:, :-1], batch[:, 1:]
    there = wanted != 0
    return F.cross_entropy(model(given)[there], wanted[there]), there.sum()


def characters_task() -> hk.Task:
    text = lines()
    tested = torch.arange(len(text)) % 8 == 0
    return hk.Task(
        model=Transformer,
        data=text[~tested],
        loss=next_letter,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        validate=text[tested],
    )


# ── both ──


def trained(task: hk.Task, codec: str, seed: int, epochs: int, batch: int) -> dict[str, float]:
    """Trains afresh and returns the last epoch's figures on what was not trained on."""
    with hk.Session(
        task, devices="cpu*2", global_batch=batch, seed=seed, compression=codec, batches="even"
    ) as session:
        session.run(epochs=epochs)
        session.wait(LIMIT_S)
        return dict(session.ledger[-1].metrics)


def compare(
    task: hk.Task, figure: str, epochs: int, batch: int, scale: float, bounds: dict[str, float]
) -> None:
    base = [scale * trained(task, "none", seed, epochs, batch)[figure] for seed in SEEDS]
    print(f"{'none':18}{mean(base):9.4f}   each: {', '.join(f'{each:.4f}' for each in base)}")
    for codec in CODECS:
        found = [scale * trained(task, codec, seed, epochs, batch)[figure] for seed in SEEDS]
        difference = mean(found) - mean(base)
        bound = bounds.get(codec)
        note = "experimental" if bound is None else f"bound {bound:+.3f}"
        print(f"{codec:18}{mean(found):9.4f}{difference:+9.4f}   {note}", flush=True)


def main() -> None:
    asked = sys.argv[1:] or ["digits", "characters"]
    if "digits" in asked:
        print("digits MLP, SGD with momentum: accuracy in %")
        compare(digits_task(), "accuracy", 20, 64, 100.0, DIGITS_BOUNDS)
    if "characters" in asked:
        print("character transformer, AdamW: loss per character")
        compare(characters_task(), "loss", 5, 32, 1.0, CHARACTERS_BOUNDS)


if __name__ == "__main__":
    main()
