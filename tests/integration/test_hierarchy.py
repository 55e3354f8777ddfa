"""Islands of fast links: the same sums, bit-equal everywhere, and less on the slow link."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.compression import COMPRESSIONS
from hetkit.planning.exchange_time import island_seconds, ring_bytes, ring_seconds, slowest_link

LIMIT_S = 90.0


def fleet(**more: Any) -> hk.Fleet:
    """Unequal islands, of 1, 3 and 2 devices."""
    return hk.emulate("T4 + 3xV100 + 2xA100", sample_s=1e-5, **more)


def double_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    ).double()


def weights(worker: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in worker.model.parameters()]


@pytest.fixture
def train(make_session: Any, make_task: Any, numbers: Any) -> Any:
    def run(epochs: int = 2, **settings: Any) -> tuple[list[list[torch.Tensor]], Any]:
        task = make_task(model=double_model, data=tuple(part.double() for part in numbers))
        devices = settings.pop("devices", None) or fleet()
        session = make_session(task, devices=devices, batches="even", **settings)
        session.run(epochs)
        session.wait(LIMIT_S)
        return session.call(weights), session

    return run


def test_a_sum_over_unequal_islands_is_the_flat_sum(train: Any) -> None:
    flat, session = train(hierarchy="off")
    assert session.plan.hierarchy == ()
    session.close()
    found, session = train(hierarchy=[[0], [1, 2, 3], [4, 5]])
    assert session.plan.hierarchy == ((0,), (1, 2, 3), (4, 5))
    for ours, theirs in zip(found[0], flat[0], strict=True):
        assert (ours - theirs).abs().max() <= 1e-15
    for one, other in pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "bit-equal"


def test_every_codec_works_between_islands_and_the_ranks_stay_equal(train: Any) -> None:
    _, session = train(epochs=1, hierarchy=[[0], [1, 2, 3], [4, 5]])
    for compression in COMPRESSIONS[1:]:
        session.set(compression=compression)
        session.run(1)
        session.wait(LIMIT_S)
        found = session.call(weights)
        assert session.ledger[-1].compression == compression
        assert all(torch.isfinite(each).all() for each in found[0])
        for one, other in pairwise(found):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), compression


def test_islands_are_the_hosts_where_that_is_faster(train: Any) -> None:
    slow_between = fleet(link={"intra": "8GB/s", "inter": "100MB/s"})
    _, session = train(epochs=1, devices=slow_between)
    assert session.plan.hierarchy == ((0,), (1, 2, 3), (4, 5))
    session.close()
    _, session = train(epochs=1, devices=fleet(link="1GB/s"))
    assert session.plan.hierarchy == (), "three passes over equal links are slower than one"


def test_an_overflow_inside_one_island_is_skipped_by_all(train: Any, make_session: Any) -> None:
    _, session = train(epochs=1, hierarchy=[[0], [1, 2, 3], [4, 5]], compression="int8")
    session.call(spoil, ranks=[2])
    session.run(1)
    session.wait(LIMIT_S)
    skipped = session.history.series("skipped")[1]
    assert sum(skipped) >= 1
    found = session.call(weights)
    for one, other in pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.isfinite(each).all() for each in found[0])


def spoil(worker: Any) -> None:
    """The next gradient of this rank is not finite."""
    first = next(worker.model.parameters())
    handle = first.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])


def test_the_links_of_islands_take_the_time_of_the_model(train: Any) -> None:
    devices = fleet(link={"intra": "1GB/s", "inter": "500kB/s"})
    _, session = train(devices=devices, hierarchy="off")
    flat_s = transfer_s(session)
    session.close()
    _, session = train(devices=devices, hierarchy="auto")
    islands_s = transfer_s(session)
    raw_bytes = sum(p.numel() * p.element_size() for p in double_model().parameters())
    by_islands = island_seconds(devices, session.plan.hierarchy, raw_bytes)
    slowest = slowest_link(devices)
    assert by_islands is not None
    assert slowest is not None
    flat = ring_seconds(6, ring_bytes(6, raw_bytes), slowest)
    assert by_islands < flat
    # The links hold each exchange for its time at least; how much longer is the machine's affair.
    assert flat_s >= 0.95 * flat
    assert islands_s >= 0.95 * by_islands
    print(f"flat {flat_s / flat:.2f} and islands {islands_s / by_islands:.2f} of the model's time")


def transfer_s(session: Any) -> float:
    """The median exposed transfer of rank 0, but of the first steps."""
    _, seconds = session.history.series("transfer_s", rank=0)
    return sorted(seconds[2:])[len(seconds[2:]) // 2]
