"""Optimizers, schedules, averages and rules, held against one plain PyTorch process in float64."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hetkit as hk
from hetkit.worker.order import epoch_order

SEED, SAMPLES, BATCH = 5, 90, 24  # four steps an epoch, the last of 18 samples
WAIT_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
"""The shadow optimizer of `Plain` never steps."""


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


def body_and_head(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def cosine(optimizer: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.3], total_steps=20)


def warm_up(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    then = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[5])


def make_task(**parts: Any) -> hk.Task:
    usual = {"model": make_model, "data": make_data(), "loss": squared, "optimizer": sgd}
    return hk.Task(**{**usual, **parts})


class Plain:
    """One process. The task's own rates live in a shadow optimizer, which nothing overrides."""

    def __init__(self, task: hk.Task) -> None:
        torch.manual_seed(SEED)
        self.task = task
        self.model = task.model()
        self.optimizer = task.optimizer(self._groups())
        self.shadow = task.optimizer(self._groups())
        self.scheduler = task.scheduler(self.shadow) if task.scheduler else None
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.epoch = 0

    def _groups(self) -> Any:
        of_model = self.task.parameters or (lambda model: model.parameters())
        return of_model(self.model)

    def train(
        self,
        *,
        lr: float | None = None,
        factor: float = 1.0,
        clip: float | None = None,
        batch=BATCH,
    ) -> None:
        order = epoch_order(SAMPLES, SEED, self.epoch)
        for start in range(0, SAMPLES, batch):
            self._step(order[start : start + batch], lr, factor, clip)
            if self.scheduler is not None and self.task.scheduler_per == "step":
                self.scheduler.step()
        if self.scheduler is not None and self.task.scheduler_per == "epoch":
            self.scheduler.step()
        self.epoch += 1

    def _step(self, rows: torch.Tensor, lr: float | None, factor: float, clip: Any) -> None:
        pairs = zip(self.optimizer.param_groups, self.shadow.param_groups, strict=True)
        for group, own in pairs:
            rates = {key: own[key] for key in own if key != "params"}
            group.update(rates)  # a cycle moves the momentum too
            group["lr"] = lr if lr is not None else own["lr"] * factor
        self.optimizer.zero_grad()
        squared(self.model, tuple(part[rows] for part in self.task.data)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.average.update_parameters(self.model)

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def parameters(worker: Any) -> torch.Tensor:
    return flat(worker.model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def epoch(session: hk.Session, **changes: Any) -> None:
    session.set(**changes)
    session.run(1)
    session.wait(WAIT_S)


def assert_alike(session: hk.Session, plain: Plain) -> None:
    wanted = flat(plain.model)
    for each in session.call(parameters):
        assert float((each - wanted).norm() / wanted.norm()) < 1e-12
    assert session.ledger[-1].lr == pytest.approx(plain.lr, rel=1e-12)


def make_session(task: hk.Task, **given: Any) -> hk.Session:
    usual = {"devices": "cpu*2", "global_batch": BATCH, "seed": SEED, "batches": [17, 7]}
    return hk.Session(task, **{**usual, **given})


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    ("scheduler", "per"),
    [(None, "epoch"), (cosine, "epoch"), (warm_up, "step"), (one_cycle, "step")],
)
def test_groups_clipping_schedules_and_changed_rates(optimizer, scheduler, per):
    task = make_task(
        optimizer=optimizer, parameters=body_and_head, scheduler=scheduler, scheduler_per=per
    )
    plain = Plain(task)
    with make_session(task) as session:
        for settings, kept in [
            ({}, {}),
            ({"lr": "x0.5", "clip_norm": 0.02}, {"factor": 0.5, "clip": 0.02}),
            ({"lr": 0.03, "micro_batch": 5}, {"lr": 0.03, "clip": 0.02}),
            ({"lr": None, "batches": [3, 21]}, {"clip": 0.02}),
        ]:
            epoch(session, **settings)
            plain.train(**kept)
            assert_alike(session, plain)
        rates = session.history.series("lr")[1]
        assert rates[-1] == pytest.approx(plain.lr)
        assert len(set(rates[:4])) == (4 if per == "step" else 1)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_the_rate_follows_the_global_batch_by_the_rule_that_was_chosen(rule, factor, tmp_path):
    task = make_task(optimizer=adamw, scheduler=cosine)
    plain = Plain(task)
    with make_session(task, batches=[1.0, 3.0], lr_rule=rule) as session:
        epoch(session)
        plain.train()
        assert_alike(session, plain)
        epoch(session, global_batch=2 * BATCH)
        plain.train(factor=factor, batch=2 * BATCH)
        assert_alike(session, plain)
        assert f"global_batch: {BATCH} → {2 * BATCH}" in session.ledger[-1].changes
        epoch(session, lr=0.01)
        plain.train(lr=0.01, batch=2 * BATCH)  # a number is taken as it is
        assert_alike(session, plain)
        session.save(tmp_path / "run.ckpt")
    with hk.Session.load(tmp_path / "run.ckpt", task, devices="cpu*1", lr="x0.5") as session:
        epoch(session)
        plain.train(factor=0.5 * factor, batch=2 * BATCH)
        assert_alike(session, plain)


def test_the_average_of_the_weights_is_pytorchs_on_all_ranks_and_survives_a_checkpoint(tmp_path):
    task = make_task(ema=0.9, validate=make_data())
    plain = Plain(task)

    def check(session: hk.Session) -> None:
        plain.train()
        assert_alike(session, plain)
        metrics = session.ledger[-1].metrics
        for name, model in (("loss", plain.model), ("ema_loss", plain.average.module)):
            with torch.no_grad():
                assert metrics[name] == pytest.approx(float(squared(model, task.data)), rel=1e-12)
        average = flat(session.model(ema=True))
        assert torch.allclose(average, flat(plain.average.module), rtol=1e-12)
        assert not torch.allclose(average, flat(session.model()), rtol=1e-6)

    with make_session(task) as session:
        for _ in range(2):
            epoch(session)
            check(session)
        session.save(tmp_path / "run.ckpt")
    with hk.Session.load(tmp_path / "run.ckpt", task, devices="cpu*1") as session:
        epoch(session)
        check(session)


def test_after_a_death_all_of_it_goes_on_bit_for_bit():
    task = make_task(
        optimizer=adamw,
        parameters=body_and_head,
        scheduler=one_cycle,
        scheduler_per="step",
        ema=0.9,
    )
    results = []
    for dies in (False, True):
        with make_session(task, sync_every=3, outer_momentum=0.3) as session:
            epoch(session)
            session.step(2)
            wait_for(session, "paused")
            if dies:
                pid = session.call(lambda worker: os.getpid(), ranks=[1])[0]
                os.kill(pid, signal.SIGKILL)
            session.resume()
            session.wait(WAIT_S)
            assert any(event.kind == "failure" for event in session.history.events) == dies
            results.append((session.call(parameters), flat(session.model(ema=True))))
    (undisturbed, average), (recovered, recovered_average) = results
    for one in (*undisturbed, *recovered):
        assert torch.equal(one, undisturbed[0])
    assert torch.equal(average, recovered_average)


def wait_for(session: hk.Session, state: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while session.state != state and time.monotonic() < deadline:
        time.sleep(0.005)
    assert session.state == state, session.error


def test_without_an_average_there_is_none_to_take_out():
    said = r"no average of the weights: give Task\(ema"
    with make_session(make_task()) as session, pytest.raises(hk.SettingsError, match=said):
        session.model(ema=True)


# ── fp16: a step that all ranks skip ──


def test_a_skipped_step_moves_no_scheduler_and_a_bad_loss_is_told_with_rank_and_step():
    features = 0.1 * torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(2))
    bad_step, batches = 2, [10, 14]
    bad = epoch_order(SAMPLES, SEED, 0)[bad_step * BATCH + batches[0] + 1]
    features[bad] = float("inf")
    task = hk.Task(
        model=lambda: torch.nn.Linear(4, 1, bias=False),
        data=features,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        scheduler=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        scheduler_per="step",
        ema=0.5,
    )
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.0}, sample_s=1e-4)
    with make_session(task, devices=fleet, batches=batches, amp="auto", lr="x0.001") as session:
        epoch(session)
        assert session.plan.amp == ("bf16", "fp16")
        np.testing.assert_allclose(
            session.history.series("lr")[1], [1e-3, 5e-4, 2.5e-4, 2.5e-4], rtol=1e-12
        )
        assert session.history.series("skipped")[1].tolist() == [0, 0, 1, 0]
        assert session.history.series("loss_scale")[1].tolist() == [2.0**16] * 2 + [2.0**15] * 2
        (notice,) = [event for event in session.history.events if event.kind == "notice"]
        assert (notice.rank, notice.step) == (1, bad_step)
        assert "loss of rank 1 was not finite" in notice.text
        row = session.ledger[-1]
        assert (row.skipped_steps, row.loss_scale) == (1, 2.0**15)
        assert notice.text in row.events
        assert "loss scale" in str(session.ledger)
