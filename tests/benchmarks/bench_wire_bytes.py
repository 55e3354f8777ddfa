"""What a codec saves: bytes against none, by formula and by the kernel's loopback counters.

Real ranks exchange the gradient of the digits MLP (64-512-512-10) over gloo and TCP, and rank 0
reads what the loopback device carried meanwhile. Other traffic only adds, so of several rounds the
one with the fewest bytes counts. Packet headers and acknowledgements are in the kernel's figure.

Run: python tests/benchmarks/bench_wire_bytes.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.wire import GroupWire

SHAPES = [
    *[("0.weight", (512, 64)), ("0.bias", (512,)), ("2.weight", (512, 512)), ("2.bias", (512,))],
    *[("4.weight", (10, 512)), ("4.bias", (10,))],
]
REACH = {
    "none": 1.0,
    "fp16": 1.98,
    "bf16": 1.98,
    "int8": 3.9,
    "int4": 7.5,
    "topk": 9.5,
    "threshold": 9.5,
    "topk(ratio=0.01)": 45.0,
    "powersgd": 50.0,
}
ROUNDS, EXCHANGES = 6, 20
COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


def exchange(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    wire = GroupWire(dist.group.WORLD, None)
    flat = torch.randn(sum(torch.Size(shape).numel() for _, shape in SHAPES))
    bucket = Bucket.of(flat, SHAPES)
    found: list[tuple[str, float, float]] = []
    for text in REACH:
        codec = make_codec(text)
        stated = codec.wire_bytes(bucket.pieces, 4, world_size)
        counted = []
        for _ in range(ROUNDS):
            dist.barrier()
            before = int(COUNTER.read_text())
            for _ in range(EXCHANGES):
                flat.normal_()
                codec.exchange(bucket, wire)
                codec.settle(True)
            dist.barrier()
            counted.append((int(COUNTER.read_text()) - before) / EXCHANGES / world_size)
        found.append((text, stated, min(counted)))
    if rank == 0:
        show(world_size, found)
    dist.destroy_process_group()


def show(world_size: int, found: list[tuple[str, float, float]]) -> None:
    (_, none, none_counted), *_ = found
    print(f"\n{world_size} ranks, {none / 1e6:.2f} MB sent by each without a codec")
    print(
        f"{'':18}{'bytes/rank':>12}{'saves':>9}{'reach':>8}{'kernel':>12}{'saves':>9}{'ratio':>8}"
    )
    for text, stated, counted in found:
        print(
            f"{text:18}{stated:12,.0f}{none / stated:8.2f}×{REACH[text]:7.2f}×"
            f"{counted:12,.0f}{none_counted / counted:8.2f}×{counted / stated:8.3f}"
        )


def main() -> None:
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(exchange, (world_size, folder), nprocs=world_size)


if __name__ == "__main__":
    main()
