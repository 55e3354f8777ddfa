"""Every codec to every other, in one run: no restart, nothing left over, no jump in the curve."""

import gc
import itertools
import os
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.compression import COMPRESSIONS

LIMIT_S = 120.0
WIDTH = 160


def every_pair() -> list[str]:
    """Returns a walk over the codecs that goes from each to each other exactly once.

    An Euler circuit (Hierholzer): every codec has as many ways in as out.
    """
    ways = {name: [other for other in COMPRESSIONS if other != name] for name in COMPRESSIONS}
    walk: list[str] = []
    stack = [COMPRESSIONS[0]]
    while stack:
        if ways[stack[-1]]:
            stack.append(ways[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def test_the_walk_has_every_pair_once():
    pairs = list(itertools.pairwise(every_pair()))
    assert sorted(pairs) == sorted(itertools.permutations(COMPRESSIONS, 2))


def alive(worker: Any) -> tuple[int, int]:
    """Returns the elements of all tensors of the process, and its threads."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors
    }
    return sum(storages.values()), len(os.listdir("/proc/self/task"))


@pytest.fixture(scope="module")
def make_wide() -> Any:
    def make() -> hk.Task:
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(64, 3, generator=generator)
        return hk.Task(
            model=lambda: torch.nn.Sequential(
                torch.nn.Linear(3, WIDTH),
                torch.nn.Tanh(),
                torch.nn.Linear(WIDTH, WIDTH),
                torch.nn.Tanh(),
                torch.nn.Linear(WIDTH, 1),
            ),
            data=(features, features.sum(1, keepdim=True)),
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        )

    return make


def test_every_pair_of_codecs_in_one_run(make_wide, fast, pids):
    walk = every_pair()
    with hk.Session(
        make_wide(), devices=fast, global_batch=16, batches=[10, 6], bucket_bytes=60_000
    ) as session:
        held: dict[str, list[list[tuple[int, int]]]] = {name: [] for name in COMPRESSIONS}
        workers: list[int] = []
        for place, compression in enumerate(walk):
            session.set(compression=compression)
            session.run(epochs=1)
            session.wait(LIMIT_S)
            held[compression].append(session.call(alive))
            workers = workers or pids(session)
            assert session.ledger[place].compression == compression
        assert pids(session) == workers, "no restart"
        losses = [row.loss for row in session.ledger]
        for compression, looks in held.items():
            # The first look comes before DDP and the optimizer have settled.
            for rank, first in enumerate(looks[1]):
                last = looks[-1][rank]
                assert last[0] <= 1.02 * first[0], f"{compression}: bytes of tensors {looks}"
                assert last[1] <= first[1] + 1, f"{compression}: threads {looks}"
    assert all(later < 1.3 * earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 0.2 * losses[0]


def test_leaving_a_codec_drops_what_waited_and_tells_its_size_and_back_is_fresh(make_wide, fast):
    def norm(worker: Any) -> float:
        return worker.codec.residual_norm() or 0.0

    with hk.Session(
        make_wide(), devices=fast, global_batch=16, batches=[10, 6], compression="topk(ratio=0.01)"
    ) as session:
        session.run(epochs=2)
        session.wait(LIMIT_S)
        assert all(each > 0 for each in session.call(norm))
        session.set(compression="none")
        session.run(epochs=1)
        session.wait(LIMIT_S)
        assert session.call(norm) == [0.0, 0.0]
        told = [event.text for event in session.history.events if "is dropped" in event.text]
        assert len(told) == 1
        assert "topk(ratio=0.01) is left" in told[0]
