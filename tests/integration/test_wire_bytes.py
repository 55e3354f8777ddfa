"""The bytes that are stated, against those that the kernel counted on the ranks' sockets."""

import functools
import os
import socket
import stat
import struct
import time
from collections import Counter
from typing import Any

import pytest
import torch

from hetkit.planning.exchange_time import ring_bytes

LIMIT_S = 120.0
STEPS = 12
BYTES_ACKED = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2000), torch.nn.Linear(2000, 500))


def acked_bytes(worker: Any) -> dict[tuple[int, int], int]:
    """What was acknowledged on this rank's TCP connections, by its own and the other's port.

    Without any headers.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the listing's own
            continue
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                ports = copy.getsockname()[1], copy.getpeername()[1]
            except OSError:  # it listens
                continue
            facts = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
            (found[ports],) = struct.unpack_from("=Q", facts, BYTES_ACKED)
    return found


def sent_between(session: Any) -> dict[tuple[int, int], int]:
    """What the kernel counted so far from rank to rank."""
    by_rank = session.call(acked_bytes)
    rank_of = {port: rank for rank, found in enumerate(by_rank) for port, _ in found}
    sent: Counter[tuple[int, int]] = Counter()
    for rank, found in enumerate(by_rank):
        for (_, peer), size in found.items():
            if peer in rank_of:
                sent[rank, rank_of[peer]] += size
    return sent


def take_steps(session: Any, steps: int) -> None:
    until = session.progress.step + steps
    session.step(steps)
    deadline = time.monotonic() + LIMIT_S
    while session.state != "paused" or session.progress.step < until:
        assert time.monotonic() < deadline, session.state
        time.sleep(0.01)


def over_steps(session: Any) -> tuple[dict[tuple[int, int], int], list[float]]:
    """What travelled in some steps: from rank to rank by the kernel, and per rank as stated."""
    take_steps(session, 4)
    before = sent_between(session)
    take_steps(session, STEPS)  # of one epoch: at its end, what waits in a codec travels too
    counted = {pair: size - before[pair] for pair, size in sent_between(session).items()}
    ranks = range(session.plan.world_size)
    stated = [sum(session.history.series("wire_bytes", rank=r)[1][-STEPS:]) for r in ranks]
    return counted, stated


@pytest.fixture
def open_session(make_session: Any, make_task: Any, numbers: Any) -> Any:
    task = make_task(
        model=make_model,
        data=tuple(part.repeat(8, 1) for part in numbers),
        loss=lambda model, batch: model(batch[0]).square().mean() * 1e-3,
    )
    return functools.partial(make_session, task, guard_every=0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "topk(ratio=0.1)"])
def test_the_stated_bytes_are_those_on_the_wire(
    open_session: Any, compression: str, world_size: int
) -> None:
    session = open_session(devices=f"cpu*{world_size}", compression=compression)
    counted, stated = over_steps(session)
    for rank, said in enumerate(stated):
        sent = sum(size for (source, _), size in counted.items() if source == rank)
        assert sent == pytest.approx(said, rel=0.05), f"rank {rank}: {sent / said:.3f}"


@pytest.mark.parametrize(("compression", "share"), [("none", 1.0), ("int8", 0.251)])
def test_between_islands_only_the_leaders_send(
    open_session: Any, compression: str, share: float
) -> None:
    session = open_session(
        devices="cpu*5", compression=compression, hierarchy=[[0], [1, 2], [3, 4]]
    )
    counted, stated = over_steps(session)
    island_of, leaders = (0, 1, 1, 2, 2), (0, 1, 3)
    across = {
        pair: size for pair, size in counted.items() if island_of[pair[0]] != island_of[pair[1]]
    }
    raw_bytes = STEPS * 4 * sum(p.numel() for p in make_model().parameters())
    for rank in range(5):
        sent = sum(size for (source, _), size in across.items() if source == rank)
        expected = share * ring_bytes(len(leaders), raw_bytes) if rank in leaders else 0.0
        assert sent == pytest.approx(expected, rel=0.05, abs=0.01 * raw_bytes), rank
    assert sum(counted.values()) == pytest.approx(sum(stated), rel=0.05)
