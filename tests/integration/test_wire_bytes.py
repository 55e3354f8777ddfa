"""The bytes that the ledger states, against those that the kernel counted on the ranks' sockets."""

import os
import socket
import stat
import struct
import time
from typing import Any

import pytest
import torch

LIMIT_S = 120.0
STEPS = 12
BYTES_ACKED = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2000), torch.nn.Linear(2000, 500))


def acked_bytes(worker: Any) -> int:
    """What the others have acknowledged on this rank's TCP sockets, without any headers."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the listing's own
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                facts = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
                total += struct.unpack_from("=Q", facts.ljust(BYTES_ACKED + 8, b"\0"), BYTES_ACKED)[
                    0
                ]
    return total


def take_steps(session: Any, steps: int) -> None:
    until = session.progress.step + steps
    session.step(steps)
    deadline = time.monotonic() + LIMIT_S
    while session.state != "paused" or session.progress.step < until:
        assert time.monotonic() < deadline, session.state
        time.sleep(0.01)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "topk(ratio=0.1)"])
def test_the_stated_bytes_are_those_on_the_wire(
    make_session: Any, make_task: Any, numbers: Any, compression: str, world_size: int
) -> None:
    task = make_task(
        model=make_model,
        data=tuple(part.repeat(8, 1) for part in numbers),
        loss=lambda model, batch: model(batch[0]).square().mean() * 1e-3,
    )
    session = make_session(
        task, devices=f"cpu*{world_size}", compression=compression, guard_every=0
    )
    take_steps(session, 4)
    before = session.call(acked_bytes)
    take_steps(session, STEPS)  # of one epoch: at its end, what waits in a codec travels too
    counted = [after - was for after, was in zip(session.call(acked_bytes), before, strict=True)]
    sent = [session.history.series("wire_bytes", rank=r)[1][-STEPS:] for r in range(world_size)]
    stated = sum(map(sum, sent))
    assert sum(counted) == pytest.approx(stated, rel=0.05), f"{sum(counted) / stated:.3f}"
