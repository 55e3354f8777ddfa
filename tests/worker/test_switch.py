"""The switch between two real ranks: agreement, and state over a checkpoint."""

import dataclasses
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.errors import WorkerError
from hetkit.plan import Plan
from hetkit.worker import checkpoint
from hetkit.worker.checkpoint import gather_states, open_state
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.exchange import Exchange
from hetkit.worker.hierarchy import Archipelago
from hetkit.worker.switch import CodecSwitch, is_adaptive

CPU = torch.device("cpu")
PLAN = Plan(
    version=1,
    epoch=0,
    first_step=0,
    epoch_first_step=0,
    epoch_steps=100,
    global_batch=4,
    batches=(2, 2),
    micro_batches=(2, 2),
    amp=("off", "off"),
    compression="topk(ratio=0.1)",
)


@pytest.fixture(scope="module")
def ranks(_whole_run: Any):
    """Two ranks of a session that train something else; calls run between its steps."""
    task = hk.Task(
        model=lambda: torch.nn.Linear(2, 1),
        data=torch.ones(8, 2),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with hk.Session(task, devices="cpu*2", global_batch=4) as session:
        session.run(epochs=1)
        session.wait(60.0)
        yield session


def disagree(worker: Any) -> list[str]:
    exchange = Exchange(torch.distributed.new_group(), None, make_codec("none"))
    switch = CodecSwitch(exchange, {}, worker.rank, CPU, Archipelago((), worker.rank))
    other = dataclasses.replace(PLAN, compression="int8")
    said = []
    try:
        for plan, step in ((PLAN, 5), (PLAN, 5 + worker.rank), (other if worker.rank else PLAN, 6)):
            try:
                switch.apply(plan, step, [])
                said.append("")
            except WorkerError as error:
                said.append(str(error))
        return said
    finally:
        exchange.close()


def test_ranks_with_other_plans_or_at_other_steps_raise_and_do_not_hang(ranks):
    for fine, at_other_steps, with_other_plans in ranks.call(disagree):
        assert not fine
        assert "rank 0 step 5, rank 1 step 6" in at_other_steps
        assert "do not put the same plan in force" in with_other_plans


def restored(worker: Any) -> tuple[list[float], float, bool, dict[str, Any]]:
    torch.manual_seed(worker.rank)
    value = torch.randn(200, 200)
    exchange = Exchange(torch.distributed.new_group(), None, make_codec("none"))
    try:
        first = CodecSwitch(exchange, {}, worker.rank, CPU, Archipelago((), worker.rank))
        first.apply(dataclasses.replace(PLAN, compression="powersgd"), 0, [])
        for step, good in enumerate((True, False, True)):
            exchange.begin_step(step)
            exchange.submit(value.clone().view(-1), [("w", value.shape)]).wait()
            exchange.settle(good)
        norm = exchange.codec.residual_norm()
        saved = first.state_dict()
        everyones = [saved]  # as if both had read the file
        torch.distributed.broadcast_object_list(everyones, src=0)
        norms = []
        for compression in ("powersgd", "powersgd(rank=3)"):
            again = CodecSwitch(exchange, {}, worker.rank, CPU, Archipelago((), worker.rank))
            again.load_state_dict(everyones[0])
            again.apply(dataclasses.replace(PLAN, compression=compression), 3, [])
            norms.append(exchange.codec.residual_norm())
        alone = everyones[0]["ranks"][:1]  # as if there had been one rank less
        grown = CodecSwitch(exchange, {}, worker.rank, CPU, Archipelago((), worker.rank))
        grown.load_state_dict({**everyones[0], "ranks": alone})
        grown.apply(dataclasses.replace(PLAN, compression="powersgd"), 3, [])
        return norms, norm, saved is None, exchange.codec.state_dict()
    finally:
        exchange.close()


def test_a_codec_takes_its_own_rank_back_and_another_codec_starts_with_nothing(ranks):
    found = ranks.call(restored)
    assert [none for _, _, none, _ in found] == [False, True], "rank 0 holds all"
    for (same, other), norm, *_ in found:
        assert same == norm > 0
        assert other == 0
    assert found[0][1] != found[1][1]
    first, new = (state for *_, state in found)
    assert first["residuals"]
    assert not new["residuals"], "nothing waits on a rank that there was not"
    assert torch.equal(first["starts"]["w"], new["starts"]["w"]), "what must be alike is"


def gathered(worker: Any) -> Any:
    before, checkpoint.CHUNK_BYTES = checkpoint.CHUNK_BYTES, 1000
    try:
        mine = {"w": torch.full((500,), float(worker.rank))} if worker.rank else {}
        blocks = gather_states(mine, CPU)
        nothing = gather_states({}, CPU)
        return blocks and [open_state(block) for block in blocks], nothing
    finally:
        checkpoint.CHUNK_BYTES = before


def test_states_of_any_size_come_to_rank_0_in_pieces(ranks):
    (blocks, nothing), others = ranks.call(gathered)
    assert nothing is None
    assert others == (None, None)
    assert blocks[0] == {}
    assert torch.equal(blocks[1]["w"], torch.ones(500))


@pytest.mark.parametrize(
    ("kind", "adaptive"), [("Adam", True), ("NAdam", True), ("RMSprop", True), ("SGD", False)]
)
def test_optimizers_that_are_not_linear_in_the_gradient_are_known(kind, adaptive):
    mine = type("Mine", (getattr(torch.optim, kind),), {})
    assert is_adaptive(mine([torch.nn.Parameter(torch.zeros(1))], lr=0.1)) is adaptive
