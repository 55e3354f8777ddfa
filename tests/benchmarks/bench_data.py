"""What seeding every sample costs, beside a plain DataLoader of the same dataset.

Fetching the same batches of a small augmenting dataset in turn (A B C, A B C …), in the process
itself: plain PyTorch, hetkit without seeding, and hetkit as it comes.

Run: python tests/benchmarks/bench_data.py
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hetkit.worker.data import open_samples
from hetkit.worker.loader import Loader
from hetkit.worker.order import Draw

ROUNDS = 7
SAMPLES = 2048
SIZES = (8, 32, 128)


class Crops(Dataset[Any]):
    """Random crops of images of 32 x 32 pixels: about as cheap as augmentation gets."""

    def __init__(self) -> None:
        self.images = torch.randn(SAMPLES, 3, 36, 36)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        x, y = torch.randint(5, (2,)).tolist()
        return self.images[index, :, x : x + 32, y : y + 32]


def batches(size: int) -> list[list[int]]:
    return [list(range(start, start + size)) for start in range(0, SAMPLES, size)]


def plain(data: Crops, size: int) -> Iterator[Any]:
    yield from DataLoader(data, batch_sampler=batches(size))


def ours(data: Crops, size: int, *, seeded: bool) -> Iterator[Any]:
    loader = Loader(open_samples(data, None, seeded=seeded), 0)
    loader.start(Draw(indices, 0) for indices in batches(size))
    for _ in range(SAMPLES // size):
        yield loader.next()


def sample_us(fetched: Iterator[Any]) -> float:
    """Returns microseconds per sample."""
    began = time.perf_counter()
    for _ in fetched:
        pass
    return (time.perf_counter() - began) / SAMPLES * 1e6


def main() -> None:
    torch.set_num_threads(1)
    data = Crops()
    for size in SIZES:
        rounds = [
            (
                sample_us(plain(data, size)),
                sample_us(ours(data, size, seeded=False)),
                sample_us(ours(data, size, seeded=True)),
            )
            for _ in range(ROUNDS)
        ]
        reference, bare, seeded = (min(column) for column in zip(*rounds, strict=True))
        print(
            f"batches of {size:3}: plain DataLoader {reference:5.1f} µs a sample, hetkit without "
            f"seeding {bare:5.1f} ({bare / reference:.2f}×), with {seeded:5.1f} "
            f"(+{seeded - bare:.1f} µs)"
        )


if __name__ == "__main__":
    main()
