"""The time split against emulated devices whose true times are known, and against the profiler."""

import time
from statistics import median
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.planning.exchange_time import ring_bytes
from hetkit.worker.codecs.codec import Codec

LIMIT_S = 120.0
STEPS = 8
WIDTH = 128
COMPUTE_S = (0.2, 0.4)
TRANSFER_S = 0.06
CODEC_S = 0.05


class Sleepy(Codec):
    """A plain sum that takes a known time to encode."""

    name = "sleepy"

    def exchange(self, bucket: Any, wire: Any) -> None:
        time.sleep(CODEC_S)
        wire.all_reduce(bucket.flat)

    def wire_bytes(self, pieces: Any, element_bytes: int, world_size: int) -> float:
        elements = sum(piece.numel for piece in pieces)
        return ring_bytes(world_size, elements * element_bytes)


class TwoLayers(torch.nn.Module):
    """Two equal weights, so that two equal buckets are ready at half and at the whole backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run(make_session: Any, **settings: Any) -> dict[str, list[float]]:
    """Trains on two emulated devices; returns the median of each part, per rank."""
    bucket_bytes = WIDTH * WIDTH * 4
    fleet = hk.emulate(
        "A100 + V100",
        pace={"A100": 2.0},
        sample_s=COMPUTE_S[1] / 8,
        link=hk.Link(bytes_per_s=ring_bytes(2, bucket_bytes) / TRANSFER_S),
    )
    task = hk.Task(
        model=TwoLayers,
        data=torch.randn(16 * STEPS, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        codecs={"sleepy": Sleepy},
    )
    session = make_session(task, devices=fleet, global_batch=16, batches=[8, 8], **settings)
    session.run(1)
    session.wait(LIMIT_S)
    parts = "step_s data_s compute_s wait_s transfer_s codec_s optimizer_s other_s overlapped_s"
    return {
        part: [median(session.history.series(part, rank=rank)[1][2:]) for rank in (0, 1)]
        for part in parts.split()
    }


def expect(found: dict[str, list[float]], **truth: list[float]) -> None:
    """Each part is within 3 % of the step of what is known."""
    for part, values in truth.items():
        for rank, value in enumerate(values):
            allowed = 0.03 * found["step_s"][rank]
            assert found[part][rank] == pytest.approx(value, abs=allowed), (part, rank, found)
    for rank in (0, 1):
        assert abs(found["other_s"][rank]) < 0.03 * found["step_s"][rank]


def test_wait_and_exposed_transfer_are_what_the_devices_and_the_link_make_them(make_session):
    found = run(make_session)  # both weights in one bucket: nothing is overlapped
    expect(
        found,
        compute_s=list(COMPUTE_S),
        wait_s=[COMPUTE_S[1] - COMPUTE_S[0], 0.0],
        transfer_s=[2 * TRANSFER_S] * 2,
        overlapped_s=[0.0, 0.0],
        codec_s=[0.0, 0.0],
    )


def test_a_bucket_that_travels_beside_the_backward_is_overlapped_not_exposed(make_session):
    found = run(make_session, bucket_bytes=1024)
    # The fast rank's first bucket is on its way from 2/3 of its own compute on, and done when the
    # slow one has come and the link has carried it: the slow one's 2/3, plus the transfer.
    first_done = COMPUTE_S[1] * 2 / 3 + TRANSFER_S
    expect(
        found,
        compute_s=list(COMPUTE_S),
        transfer_s=[2 * TRANSFER_S, TRANSFER_S],
        wait_s=[COMPUTE_S[1] - COMPUTE_S[0] - TRANSFER_S, 0.0],
        overlapped_s=[max(0.0, COMPUTE_S[0] - COMPUTE_S[0] * 2 / 3), TRANSFER_S],
    )
    assert first_done < COMPUTE_S[1]


def test_what_the_codec_takes_after_the_cut_is_its_own(make_session):
    found = run(make_session, compression="task:sleepy", guard_every=0)
    expect(
        found,
        compute_s=list(COMPUTE_S),
        codec_s=[CODEC_S, CODEC_S],
        wait_s=[COMPUTE_S[1] - COMPUTE_S[0], 0.0],
        transfer_s=[2 * TRANSFER_S] * 2,
    )


def profiled(worker: Any) -> tuple[list[float], list[float]]:
    """The stamps of plain sums, and what the profiler saw of them, in seconds."""
    from hetkit.worker.wire import GroupWire

    wire = GroupWire(torch.distributed.new_group(), None)
    tensor = torch.ones(1_000_000)
    wire.all_reduce(tensor)
    wire.collectives.clear()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            torch.distributed.barrier()
            wire.all_reduce(tensor)
    seen = [
        event.time_range.elapsed_us() / 1e6
        for event in profile.events()
        if event.name == "gloo:all_reduce"
    ]
    return [end - start for start, end in wire.collectives], seen


def test_the_stamps_agree_with_the_profiler(make_session, make_task):
    session = make_session(make_task(), devices="cpu*2")
    session.run(1)
    session.wait(LIMIT_S)
    for stamps, seen in session.call(profiled):
        assert len(seen) >= len(stamps) == 5  # a barrier may count as a sum of nothing
        within, whole = median(sorted(seen)[-5:]), median(stamps)
        assert 0.7 * whole <= within <= 1.05 * whole, "the profiler's spans lie inside the stamps"
