"""What a rank's compute figure says: its own computing, whatever the others do."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetkit as hk

EPOCHS = 3
SLOW_FROM_STEP = 6


def mean(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def slept(model: Any, batch: Any) -> torch.Tensor:
    """Takes 10 ms; on rank 1, after some steps, 50 ms."""
    model.calls = getattr(model, "calls", 0) + 1
    peer = dist.is_initialized() and dist.get_rank() == 1
    time.sleep(0.05 if peer and model.calls > SLOW_FROM_STEP else 0.01)
    return mean(model, batch)


def compute_s(session: hk.Session, rank: int, steps: range) -> float:
    records = [r for r in session.history.records_since(0) if r.step in steps]
    return median(record.ranks[rank].compute_s for record in records)


def test_a_fast_ranks_figure_stays_when_a_real_peer_becomes_slow(
    make_session: Callable[..., hk.Session], make_task: Callable[..., hk.Task]
) -> None:
    session = make_session(make_task(loss=slept), devices="cpu*2", batches=[8, 8])
    session.run(epochs=EPOCHS)
    session.wait(60)
    before, after = range(1, SLOW_FROM_STEP - 1), range(SLOW_FROM_STEP + 1, 4 * EPOCHS)
    assert compute_s(session, 1, after) > 3 * compute_s(session, 1, before)
    # The fast one sleeps as long as before; that it waits 40 ms for its peer is no computing.
    assert compute_s(session, 0, after) < 1.5 * compute_s(session, 0, before)
    waits = [r.ranks[0].wait_s for r in session.history.records_since(0) if r.step in after]
    assert median(waits) > 0.02


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_fast_ranks_figure_is_its_devices_whatever_the_peers_pace(
    make_session: Callable[..., hk.Session], make_task: Callable[..., hk.Task], factor: float
) -> None:
    fleet = hk.emulate(
        "A100 + V100",
        pace={"A100": 2.0, "V100": 1.0},
        sample_s=5e-3,
        slow_down={"V100": hk.SlowDown(at_s=0.0, factor=factor)},
    )
    session = make_session(make_task(), devices=fleet, batches=[8, 8])
    session.run(epochs=EPOCHS)
    session.wait(60)
    steps = range(2, 4 * EPOCHS)
    assert compute_s(session, 0, steps) == pytest.approx(8 * 5e-3 / 2.0, rel=0.4)
    assert compute_s(session, 1, steps) == pytest.approx(8 * 5e-3 * factor, rel=0.4)


def test_warming_up_sees_two_sizes_and_leaves_the_maths_alone(
    make_session: Callable[..., hk.Session],
    make_task: Callable[..., hk.Task],
    weights: Callable[[hk.Session], torch.Tensor],
) -> None:
    fleet = hk.emulate("A100 + V100", pace={"A100": 2.0}, sample_s=1e-3)
    found = []
    for batches in ("auto", [10, 6]):
        session = make_session(make_task(), devices=fleet, batches=batches)
        session.run(epochs=6)
        session.wait(60)
        found.append(weights(session))
        if batches == "auto":
            splits = {
                tuple(rank.batch for rank in r.ranks) for r in session.history.records_since(0)
            }
            assert len(splits) >= 2
            assert session.verdict() is not None
        session.close()
    assert torch.allclose(*found, atol=1e-6)
