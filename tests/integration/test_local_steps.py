"""sync_every: real ranks against the same algorithm, played by one process in float64."""

import copy
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import hetkit as hk
from hetkit.plan import Plan
from hetkit.planning.exchange_time import ring_bytes
from hetkit.worker.order import epoch_order, step_slice

SEED, SAMPLES, BATCH = 4, 165, 24  # seven steps an epoch, the last of 21 samples
STEPS = 7
WAIT_S = 60.0


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    ).double()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return features, features.sum(1, keepdim=True).sin()


def squared(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def positive(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over a part of the samples; some micro-batches have none."""
    mask = batch[1] > 0.3
    errors = (model(batch[0]) - batch[1]).square() * mask
    return errors.sum() / mask.sum(), mask.sum()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_task(**parts: Any) -> hk.Task:
    usual = {"model": make_model, "data": make_data(), "loss": squared, "optimizer": sgd}
    return hk.Task(**{**usual, **parts})


class Simulation:
    """One process that keeps a model and an optimizer for each rank."""

    def __init__(self, task: hk.Task, world_size: int) -> None:
        torch.manual_seed(SEED)
        first = task.model()
        self.task = task
        self.models = [copy.deepcopy(first) for _ in range(world_size)]
        self.optimizers = [task.optimizer(model.parameters()) for model in self.models]
        self.velocity: list[torch.Tensor] | None = None
        self.epoch = 0

    def train(
        self,
        batches: Sequence[int],
        every: int,
        *,
        outer_momentum: float = 0.0,
        clip: float | None = None,
    ) -> None:
        world_size = len(batches)
        plan = Plan(
            version=1,
            epoch=0,
            first_step=0,
            epoch_first_step=0,
            epoch_steps=STEPS,
            global_batch=BATCH,
            batches=tuple(batches),
            micro_batches=(BATCH,) * world_size,
            amp=("off",) * world_size,
            compression="none",
        )
        order = epoch_order(SAMPLES, SEED, self.epoch)
        start = [p.detach().clone() for p in self.models[0].parameters()]
        counts, made = [0.0] * world_size, [0] * world_size
        for step in range(STEPS):
            place, shares = step_slice(plan, step, SAMPLES)
            for rank, share in enumerate(shares):
                count = self._local_step(rank, order[place : place + share], clip)
                counts[rank] += count
                made[rank] += count > 0
                place += share
            if (step + 1) % every == 0 or step == STEPS - 1:
                self._average(start, counts, made, outer_momentum)
                start = [p.detach().clone() for p in self.models[0].parameters()]
                counts, made = [0.0] * world_size, [0] * world_size
        busiest = list(batches).index(max(batches))
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(self.optimizers[busiest].state_dict()))
        self.epoch += 1

    def _local_step(self, rank: int, rows: torch.Tensor, clip: float | None) -> float:
        if not len(rows):
            return 0.0
        model, optimizer = self.models[rank], self.optimizers[rank]
        optimizer.zero_grad()
        returned = self.task.loss(model, tuple(part[rows] for part in self.task.data))
        loss, count = returned if isinstance(returned, tuple) else (returned, len(rows))
        if not count:
            return 0.0
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return float(count)

    def _average(
        self, start: list[torch.Tensor], counts: list[float], made: list[int], momentum: float
    ) -> None:
        shares = [count / sum(counts) for count in counts]
        steps = sum(p * h for p, h in zip(shares, made, strict=True))
        changes = [
            steps
            * sum(p * (w.detach() - x) / h for p, h, w in zip(shares, made, of, strict=True) if h)
            for x, *of in zip(start, *(m.parameters() for m in self.models), strict=True)
        ]
        if momentum:
            before = self.velocity or [torch.zeros_like(change) for change in changes]
            changes = [momentum * u + change for u, change in zip(before, changes, strict=True)]
            self.velocity = changes
        with torch.no_grad():
            for model in self.models:
                for p, x, change in zip(model.parameters(), start, changes, strict=True):
                    p.copy_(x + change)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def parameters(worker: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker.model.parameters()]).clone()


def make_session(task: hk.Task, **given: Any) -> hk.Session:
    usual = {"devices": "cpu*2", "global_batch": BATCH, "seed": SEED, "batches": [17, 7]}
    return hk.Session(task, **{**usual, **given})


def epoch(session: hk.Session, **changes: Any) -> None:
    session.set(**changes)
    session.run(1)
    session.wait(WAIT_S)


def reach(session: hk.Session, state: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while session.state != state and time.monotonic() < deadline:
        time.sleep(0.005)
    assert session.state == state, session.error


def equal_on_all_ranks(session: hk.Session) -> torch.Tensor:
    first, *others = session.call(parameters)
    assert all(torch.equal(first, other) for other in others)
    return first


def difference(session: hk.Session, wanted: torch.nn.Module) -> float:
    got = equal_on_all_ranks(session)
    return float((got - flat(wanted)).norm() / flat(wanted).norm())


@pytest.mark.parametrize(
    ("optimizer", "loss", "batches", "momentum", "clip"),
    [
        (sgd, squared, [17, 7], 0.0, None),
        (sgd, squared, [24, 0], 0.5, None),
        (adamw, positive, [23, 1], 0.0, 0.5),
        (adamw, squared, [9, 14, 1], 0.3, None),
    ],
)
def test_it_is_the_algorithm_of_its_description(optimizer, loss, batches, momentum, clip):
    task = make_task(optimizer=optimizer, loss=loss)
    simulation = Simulation(task, len(batches))
    with make_session(
        task,
        devices=f"cpu*{len(batches)}",
        batches=batches,
        sync_every=3,
        outer_momentum=momentum,
        clip_norm=clip,
        micro_batch=5,
    ) as session:
        for split in (batches, batches[::-1]):
            epoch(session, batches=split)
            simulation.train(split, 3, outer_momentum=momentum, clip=clip)
            assert difference(session, simulation.models[0]) < 1e-12


def test_with_one_step_between_it_is_the_shared_gradient_for_plain_sgd():
    """One step an epoch, so that the epoch's end synchronises each: other code, the same maths."""
    task = make_task(optimizer=plain_sgd)
    with make_session(task, global_batch=SAMPLES, batches=[100, 65]) as session:
        for _ in range(3):
            epoch(session)
        wanted = session.model()
    with make_session(task, global_batch=SAMPLES, batches=[100, 65], sync_every=9) as session:
        for _ in range(3):
            epoch(session)
        assert difference(session, wanted) < 1e-12


def test_a_summed_loss_stays_a_sum():
    """Of the whole step: a rank's own part is scaled up to it."""
    task = make_task(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
        reduction="sum",
    )
    results = []
    for every in (1, 9):
        with make_session(
            task, global_batch=SAMPLES, batches=[100, 65], sync_every=every
        ) as session:
            epoch(session)
            results.append(equal_on_all_ranks(session))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_sync_every_1_is_what_happens_without_it_bit_for_bit():
    results = []
    for settings in ({}, {"sync_every": 1, "outer_momentum": 0.9}):
        with make_session(make_task(), **settings) as session:
            epoch(session)
            results.append(equal_on_all_ranks(session))
    assert torch.equal(*results)


def test_the_ranks_part_between_two_synchronisations_and_meet_again():
    with make_session(make_task(), sync_every=4) as session:
        for steps, alike in [(3, False), (1, True), (2, False), (1, True)]:
            session.step(steps)
            reach(session, "paused" if session.progress.step + steps < STEPS else "ready")
            first, second = session.call(parameters)
            assert torch.equal(first, second) == alike


def test_a_pause_rests_where_the_ranks_stand_alike():
    fleet = hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=2e-3)
    with make_session(make_task(), devices=fleet, sync_every=3) as session:
        session.run(2)
        while session.progress.step < 1 and session.state != "failed":
            time.sleep(0.005)
        session.pause()
        reach(session, "paused")
        done = session.progress.step
        assert done % STEPS in (0, 3, 6)
        equal_on_all_ranks(session)
        session.resume()
        session.wait(WAIT_S)


def test_leaving_local_steps_is_exact_and_all_is_marked():
    """The optimizer's state is one again at the epoch's end: shared gradients go on from there."""
    task = make_task(optimizer=adamw)
    simulation = Simulation(task, 2)
    with make_session(task) as session:
        for every in (1, 3, 1):
            epoch(session, sync_every=every)
            if every > 1:
                simulation.train([17, 7], every)
            else:
                together(simulation)
            assert difference(session, simulation.models[0]) < 1e-12
        assert [row.sync_every for row in session.ledger] == [1, 3, 1]
        assert session.ledger[1].changes == ("sync_every: 1 → 3",)
        assert "every 3 (other maths)" in str(session.ledger)
        (notice,) = [e for e in session.history.events if e.kind == "notice"]
        assert notice.step == STEPS
        assert "not the maths of one process" in notice.text


def together(simulation: Simulation) -> None:
    """An epoch of shared gradients, by the first model, which the others copy."""
    order = epoch_order(SAMPLES, SEED, simulation.epoch)
    model, optimizer = simulation.models[0], simulation.optimizers[0]
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        rows = order[start : start + BATCH]
        squared(model, tuple(part[rows] for part in simulation.task.data)).backward()
        optimizer.step()
    for other, its in zip(simulation.models[1:], simulation.optimizers[1:], strict=True):
        other.load_state_dict(model.state_dict())
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    simulation.epoch += 1


def test_a_checkpoint_at_an_epochs_end_goes_on_exactly(tmp_path):
    task, settings = make_task(), {"sync_every": 2, "outer_momentum": 0.4}
    with make_session(task, **settings) as session:
        epoch(session)
        session.save(tmp_path / "run.ckpt")
        epoch(session)
        wanted = session.model()
    with hk.Session.load(tmp_path / "run.ckpt", task, devices="cpu*2") as session:
        assert (session.settings.sync_every, session.settings.outer_momentum) == (2, 0.4)
        epoch(session)
        assert difference(session, wanted) == 0.0


def test_about_one_in_h_bytes_travels_and_the_time_split_stays_right():
    fleet = hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=2e-4, link="50MB/s")
    model_bytes = 8 * sum(p.numel() for p in make_model().parameters())
    with make_session(make_task(), devices=fleet, batches="even") as session:
        epoch(session)
        epoch(session, sync_every=4)
        sent = session.history.series("wire_bytes", rank=1)[1]
        assert sent[:STEPS].tolist() == [ring_bytes(2, model_bytes)] * STEPS
        assert sent[STEPS:].tolist() == [0, 0, 0, sent[0], 0, 0, sent[0]]
        assert session.ledger[1].wire_bytes == pytest.approx(sent[0] * 2 / STEPS)
        for rank in (0, 1):
            parts = [
                session.history.series(f"{part}_s", rank=rank)[1][STEPS:]
                for part in ("wait", "transfer")
            ]
            exchanged = sum(parts) > 0
            assert exchanged.tolist() == [False, False, False, True, False, False, True]
            other = session.history.series("other_s", rank=rank)[1]
            assert (other > -1e-4).all(), "nothing is counted twice"


def test_changes_may_travel_compressed():
    with make_session(make_task(), sync_every=3, compression="bf16") as session:
        epoch(session)
        simulation = Simulation(make_task(), 2)
        simulation.train([17, 7], 3)
        assert 1e-9 < difference(session, simulation.models[0]) < 1e-2


def test_a_single_rank_takes_plain_steps_unless_it_has_an_outer_momentum():
    with make_session(make_task(), devices="cpu*1", batches="auto") as session:
        epoch(session)
        plain = equal_on_all_ranks(session)
    for momentum in (0.0, 0.5):
        simulation = Simulation(make_task(), 1)
        simulation.train([BATCH], 2, outer_momentum=momentum)
        with make_session(
            make_task(),
            devices="cpu*1",
            batches="auto",
            sync_every=2,
            outer_momentum=momentum,
        ) as session:
            epoch(session)
            assert difference(session, simulation.models[0]) < 1e-12
            alike = torch.allclose(equal_on_all_ranks(session), plain, rtol=1e-12)
            assert alike == (momentum == 0.0)


def test_an_overflow_is_skipped_by_its_rank_alone_and_the_scale_is_one_again_at_the_sync():
    bad_step, batches = 1, [10, 14]
    features, targets = (0.1 * part.float() for part in make_data())
    bad = epoch_order(SAMPLES, SEED, 0)[bad_step * BATCH + batches[0] + 1]
    features[bad] = float("inf")
    task = hk.Task(
        model=lambda: torch.nn.Linear(4, 1),
        data=(features, targets),
        loss=squared,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.0}, sample_s=1e-4)
    with make_session(task, devices=fleet, batches=batches, amp="auto", sync_every=3) as session:
        epoch(session)
        assert equal_on_all_ranks(session).isfinite().all()
        assert session.call(lambda worker: worker.loss_scale) == [2.0**15] * 2
        (skip,) = [event for event in session.history.events if event.kind == "skip"]
        assert (skip.step, skip.text) == (
            bad_step,
            "a gradient was not finite: rank 1 skipped the step",
        )
        np.testing.assert_array_equal(session.history.series("skipped")[1], [0, 1, 0, 0, 0, 0, 0])
