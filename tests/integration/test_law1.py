"""Law 1: changing the split changes speed, never the maths.

Every session here is held against `Plain`: one plain PyTorch process that knows nothing of hetkit
but the order of the samples.
"""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import hetkit as hk
from hetkit.worker.order import epoch_order

SEED = 3
GLOBAL_BATCH = 48
SAMPLES = 200  # the last of an epoch's five steps has 8 samples
STEPS = 5
WAIT_S = 60.0


class Mlp(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 24), torch.nn.Tanh(), torch.nn.Linear(24, 10))


class RecordingSgd(torch.optim.SGD):
    """Keeps every gradient that it is given."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: None = None) -> None:
        self.seen.append(flat(p.grad for p in self.param_groups[0]["params"]))
        super().step(closure)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).clone()


def mean_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def counted_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over what is not masked: some micro-batches have much, some have nothing."""
    weights = (batch[1] % 3 == 0).to(batch[0].dtype)
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * weights).sum() / weights.sum(), weights.sum()


def digits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:SAMPLES] / 16, dtype=dtype), torch.tensor(labels[:SAMPLES])


def double_task(loss: Any = mean_loss, **more: Any) -> hk.Task:
    return hk.Task(
        **{
            "model": lambda: Mlp().double(),
            "data": digits(torch.float64),
            "loss": loss,
            "optimizer": lambda parameters: RecordingSgd(list(parameters), lr=0.05),
            **more,
        }
    )


def single_task(**more: Any) -> hk.Task:
    return hk.Task(
        **{
            "model": Mlp,
            "data": digits(torch.float32),
            "loss": mean_loss,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            **more,
        }
    )


@dataclass
class Plain:
    """One plain PyTorch process: forward, backward, clip, step. Nothing else."""

    task: hk.Task
    clip_norm: float | None = None
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = self.task.model()
        self.optimizer = self.task.optimizer(self.model.parameters())

    def train(self, epochs: range) -> "Plain":
        parts = self.task.data
        for epoch in epochs:
            order = epoch_order(SAMPLES, SEED, epoch)
            for start in range(0, SAMPLES, GLOBAL_BATCH):
                self.step(tuple(part[order[start : start + GLOBAL_BATCH]] for part in parts))
        return self

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        returned = self.task.loss(self.model, batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def start_at(self, state: dict[str, Any]) -> "Plain":
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self


def state(worker: Any) -> dict[str, Any]:
    worker.optimizer.seen.clear()
    return {
        "model": worker.model.state_dict(),
        "optimizer": worker.optimizer.state_dict(),
        "epoch": worker.epoch,
    }


def gradients(worker: Any) -> torch.Tensor:
    return torch.stack(worker.optimizer.seen)


def parameters(worker: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker.model.parameters()]).clone()


def one_epoch(session: hk.Session, **settings: Any) -> None:
    session.set(**settings)
    session.run(epochs=1)
    session.wait(WAIT_S)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to the row's norm."""
    norms = torch.linalg.vector_norm(expected, dim=-1)
    return float((torch.linalg.vector_norm(got - expected, dim=-1) / norms).max())


# ── float64: every step's gradient ──

SPLITS = {
    1: ("even", [48]),
    2: ("even", [1.0, 2.3], [5.0, 1.0], [41, 7], [0, 48], [48, 0]),
    4: ("even", [1.0, 2.3, 5.0, 1.0], [40, 1, 6, 1], [0, 24, 0, 24]),
}
LOSSES = {"mean": mean_loss, "counted": counted_loss}


@pytest.fixture(scope="module", params=itertools.product(LOSSES, SPLITS), ids=str)
def doubles(request: pytest.FixtureRequest, _whole_run: Any):
    loss, ranks = request.param
    task = double_task(LOSSES[loss])
    Plain(task)  # PyTorch patches an optimizer's class when its first object is made: before the
    # session pickles it, or the second run would see changed code and start fresh workers.
    with hk.Session(
        task, devices=f"cpu*{ranks}", global_batch=GLOBAL_BATCH, seed=SEED, batches="even"
    ) as session:
        one_epoch(session)
        yield task, session, SPLITS[ranks]


@pytest.mark.parametrize("micro_batch", [None, 3, 7])
def test_float64_gradients_are_those_of_one_process(doubles, micro_batch):
    task, session, splits = doubles
    for batches in splits:
        before = session.call(state)[0]
        one_epoch(session, batches=batches, micro_batch=micro_batch)
        plain = Plain(task).start_at(before).train(range(before["epoch"], before["epoch"] + 1))
        every = session.call(gradients)
        assert all(torch.equal(each, every[0]) for each in every[1:]), batches
        assert len(every[0]) == STEPS
        assert relative(every[0], gradients(plain)) < 1e-12, batches


def test_clipping_is_that_of_one_process(doubles):
    task, session, splits = doubles
    session.set(batches="even")
    before = session.call(state)[0]
    one_epoch(session, batches=splits[-1], micro_batch=7, clip_norm=0.05)
    epochs = range(before["epoch"], before["epoch"] + 1)
    plain = Plain(task, clip_norm=0.05).start_at(before).train(epochs)
    assert relative(session.call(gradients)[0], gradients(plain)) < 1e-12
    session.set(clip_norm=None)


# ── float32: the loss curve of three epochs ──


def curve(session: hk.Session) -> np.ndarray:
    return session.history.series("loss")[1]


@pytest.fixture(scope="module")
def plain_curve() -> np.ndarray:
    return np.array(Plain(single_task()).train(range(3)).losses)


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        ("cpu*1", {"micro_batch": 7}),
        ("inline", {}),
        ("cpu*2", {"batches": [24, 24]}),
        ("cpu*2", {"batches": [1.0, 2.3], "micro_batch": 7}),
        ("cpu*2", {"batches": [48, 0]}),
        ("cpu*4", {"batches": [5.0, 1.0, 2.3, 1.0], "micro_batch": 3}),
        ("cpu*4", {"batches": [5.0, 1.0, 2.3, 1.0], "bucket_bytes": 1024}),
    ],
    ids=str,
)
def test_float32_loss_curve_is_that_of_one_process(devices, settings, plain_curve):
    with hk.Session(
        single_task(), devices=devices, global_batch=GLOBAL_BATCH, seed=SEED, **settings
    ) as session:
        session.run(epochs=3)
        session.wait(WAIT_S)
        np.testing.assert_allclose(curve(session), plain_curve, rtol=1e-5)


def test_adamw_trains_as_in_one_process():
    task = single_task(
        model=lambda: Mlp().double(),
        data=digits(torch.float64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
    )
    plain = Plain(task).train(range(2))
    with hk.Session(
        task, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED, batches=[1.0, 2.3]
    ) as session:
        session.run(epochs=2)
        session.wait(WAIT_S)
        np.testing.assert_allclose(curve(session), plain.losses, rtol=1e-10)
        for each in session.call(parameters):
            assert relative(each, parameters(plain)) < 1e-9


def emulated() -> Any:
    return hk.emulate("1xA100 + 1xV100", pace={"A100": 2.3}, sample_s=5e-4)


def await_step(session: hk.Session, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while session.progress.step < step and time.monotonic() < deadline:
        time.sleep(0.005)
    assert session.progress.step >= step, session.error


def test_a_split_changed_while_it_runs_leaves_the_curve(plain_curve):
    with hk.Session(
        single_task(), devices=emulated(), global_batch=GLOBAL_BATCH, seed=SEED, batches="even"
    ) as session:
        session.run(epochs=3)
        await_step(session, 1)
        session.set(batches=[33, 15], micro_batch=7)
        await_step(session, 8)
        session.set(batches=[5.0, 1.0])
        session.wait(WAIT_S)
        batches = session.history.series("batch", rank=0)[1]
        assert len(set(batches)) > 3, "the split never changed"
        np.testing.assert_allclose(curve(session), plain_curve, rtol=1e-5)


def test_the_balancer_leaves_the_curve(plain_curve):
    with hk.Session(
        single_task(), devices=emulated(), global_batch=GLOBAL_BATCH, seed=SEED
    ) as session:
        session.run(epochs=3)
        session.wait(WAIT_S)
        assert session.plan.batches != (24, 24), "the balancer never acted"
        np.testing.assert_allclose(curve(session), plain_curve, rtol=1e-5)


# ── models and losses that a plain process takes without a murmur ──


class TwoHeads(torch.nn.Module):
    """Computes more than its loss looks at, has a frozen part, a forgotten one, and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(64, 16)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.head, self.ignored = torch.nn.Linear(16, 10), torch.nn.Linear(16, 5)
        self.forgotten = torch.nn.Parameter(torch.ones(3))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.frozen(torch.tanh(self.body(images))))
        return self.head(hidden), self.ignored(hidden)

    def penalty(self) -> torch.Tensor:
        return 0.1 * self.head.weight.square().mean()


def two_heads_loss(model: Any, batch: Any) -> torch.Tensor:
    once, again = model(batch[0])[0], model(batch[0].flip(1))[0]
    return F.cross_entropy(once + 0.1 * again, batch[1]) + model.penalty()


def test_unused_heads_model_methods_and_two_forwards_are_as_in_one_process():
    task = single_task(
        model=TwoHeads,
        loss=two_heads_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    )
    plain = Plain(task).train(range(1))
    with hk.Session(
        task, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED, batches=[1.0, 2.3]
    ) as session:
        session.run(epochs=1)
        session.wait(WAIT_S)
        np.testing.assert_allclose(curve(session), plain.losses, rtol=1e-5)
        session.set(batches=[0, 48])
        session.run(epochs=1)
        session.wait(WAIT_S)
        plain.train(range(1, 2))
        np.testing.assert_allclose(curve(session), plain.losses, rtol=1e-5)
        forgotten = session.call(lambda worker: worker.model.forgotten.detach())
        assert all(torch.equal(each, torch.ones(3)) for each in forgotten)
        (notice,) = [event for event in session.history.events if event.kind == "notice"]
        assert "forgotten" in notice.text
        assert "ignored.weight" in notice.text


class Tied(torch.nn.Module):
    """Two layers share their weights, and a sparse table looks one pixel up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(17, 64, sparse=sparse)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        looked_up = self.table((images[:, 20] * 16).long())
        return self.head(torch.tanh(self.second(torch.tanh(self.first(images + looked_up)))))


@pytest.mark.parametrize("devices", ["cpu*1", "cpu*2"])
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_weights_sparse_gradients_and_loader_processes_are_as_in_one_process(devices, sparse):
    task = single_task(
        model=lambda: Tied(sparse),
        num_workers=0 if sparse else 1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    plain = Plain(task).train(range(2))
    split = {"cpu*1": [48], "cpu*2": [40, 8]}[devices]
    with hk.Session(
        task, devices=devices, global_batch=GLOBAL_BATCH, seed=SEED, batches=split, micro_batch=13
    ) as session:
        for _ in range(2):
            one_epoch(session, batches=split[::-1])
        np.testing.assert_allclose(curve(session), plain.losses, rtol=1e-5)


# ── why it needs the weighting at all ──


def test_a_uniform_mean_over_the_ranks_is_wrong_for_unequal_splits():
    task = double_task()
    batch = tuple(part[:GLOBAL_BATCH] for part in task.data)
    torch.manual_seed(SEED)
    model = task.model()

    def gradient(start: int, stop: int) -> torch.Tensor:
        model.zero_grad()
        mean_loss(model, tuple(part[start:stop] for part in batch)).backward()
        return flat(p.grad for p in model.parameters())

    whole, first, second = gradient(0, 48), gradient(0, 40), gradient(40, 48)
    assert relative((first + second) / 2, whole) > 0.1  # what DDP does by itself
    assert relative((40 * first + 8 * second) / 48, whole) < 1e-12
