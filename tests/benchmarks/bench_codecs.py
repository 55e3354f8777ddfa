"""What a codec costs: GB/s of raw gradient on one core, beside torch's own hooks.

Every codec exchanges a bucket of 4 million float32 (one matrix) over a wire that only copies, so
what is timed is encoding, adding up and decoding. torch's fp16 and PowerSGD hooks run under DDP in
a group of one process, timed from the call to the end of what they chained. All take turns
(A B A B), after a warm-up; printed is the median.

Run: python tests/benchmarks/bench_codecs.py
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from hetkit.compression import COMPRESSIONS
from hetkit.worker.codecs.bucket import Bucket
from hetkit.worker.codecs.registry import make_codec

SHAPE = (2048, 2048)
ROUNDS = 15
WARM_UP = 3
TEXTS = [*COMPRESSIONS[1:], "topk(ratio=0.01)"]


class CopyingWire:
    """One of two ranks; the other one has the same gradients."""

    world_size, rank = 2, 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        half = len(input) // 2
        output.view(2, half).copy_(input[:half])

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.view(2, len(input)).copy_(input)


def ours(text: str, gradient: torch.Tensor) -> Callable[[], float]:
    codec, wire = make_codec(text), CopyingWire()
    flat = torch.empty_like(gradient)

    def once() -> float:
        bucket = Bucket.of(flat.copy_(gradient), [("w", SHAPE)])
        began = time.perf_counter()
        codec.exchange(bucket, wire)
        codec.settle(True)
        return time.perf_counter() - began

    return once


def theirs(hook: Callable[..., Any], state: object) -> Callable[[], float]:
    model = DistributedDataParallel(torch.nn.Linear(*SHAPE, bias=False), bucket_cap_mb=64)
    seconds = [0.0]

    def timed(given: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        began = time.perf_counter()
        future = hook(given, bucket)
        future.wait()
        seconds[0] = time.perf_counter() - began
        return future

    model.register_comm_hook(state, timed)
    batch = torch.randn(1, SHAPE[0])

    def once() -> float:
        model(batch).sum().backward()
        return seconds[0]

    return once


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gradient = torch.randn(SHAPE).view(-1)
    power = torch_powersgd.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    runs = {text: ours(text, gradient) for text in TEXTS}
    runs["torch's fp16 hook"] = theirs(default_hooks.fp16_compress_hook, None)
    runs["torch's PowerSGD hook, rank 2"] = theirs(torch_powersgd.powerSGD_hook, power)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + ROUNDS):
        for name, once in runs.items():
            times[name].append(once())
    dist.destroy_process_group()
    gigabytes = gradient.numel() * 4 / 1e9
    print(f"{'one core, float32':32}{'GB/s':>7}{'ns/element':>12}")
    for name, taken in times.items():
        typical = median(taken[WARM_UP:])
        print(f"{name:32}{gigabytes / typical:7.2f}{typical / gradient.numel() * 1e9:12.2f}")
    fp16, powersgd = (median(times[name][WARM_UP:]) for name in ("fp16", "powersgd"))
    for name, own in (("torch's fp16 hook", fp16), ("torch's PowerSGD hook, rank 2", powersgd)):
        print(f"{name} takes {median(times[name][WARM_UP:]) / own:.2f} of our time")


if __name__ == "__main__":
    main()
