"""One plain PyTorch process, to which everything is held."""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

import hetkit as hk
from hetkit.plan import Plan
from hetkit.worker.data import open_training, open_validation
from hetkit.worker.order import EpochOrder, step_slice
from hetkit.worker.rounds import rounds

SEED = 3


class Plain:
    """Forward, backward, clip, step, schedule. All it has of hetkit are the samples, in order."""

    def __init__(self, task: hk.Task) -> None:
        torch.manual_seed(SEED)
        self.task = task
        self.model = task.model()
        parameters = self.model.parameters()
        self.optimizer = task.optimizer(
            task.parameters(self.model) if task.parameters else parameters
        )
        self.scheduler = task.scheduler(self.optimizer) if task.scheduler else None
        self.samples = open_training(task, SEED)
        self.order = EpochOrder(self.samples, task.sampler, seed=SEED)
        self.losses: list[float] = []
        self.metrics: dict[str, float] = {}

    def batch(self, epoch: int, start: int, size: int) -> Any:
        self.order.take(epoch)
        chosen = self.order.indices[start : start + size].tolist()
        repeats = self.order.repeats
        repeats = None if repeats is None else repeats[start : start + size].tolist()
        return self.samples.fetch(chosen, epoch=epoch, repeats=repeats)

    def train(self, plan: Plan) -> None:
        """Trains an epoch; where BatchNorm looks across a micro-batch, in the plan's rounds."""
        self.order.take(plan.epoch)
        normed = any(
            isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in self.model.modules()
        )
        for step in range(plan.epoch_first_step, plan.last_step + 1):
            start, shares = step_slice(plan, step, len(self.order))
            sizes = [sum(part) for part in rounds(shares, plan.micro_batches)]
            self.step(plan, start, sizes if normed else [sum(shares)])
        if self.scheduler and self.task.scheduler_per == "epoch":
            self.scheduler.step()
        if self.task.validate is not None:
            self.validate()

    def step(self, plan: Plan, start: int, sizes: list[int]) -> None:
        self.optimizer.zero_grad()
        edges = [start + sum(sizes[:place]) for place in range(len(sizes) + 1)]
        size = sum(sizes)
        passed = []
        for first, stop in pairwise(edges):
            batch = self.batch(plan.epoch, first, stop - first)
            passed.append(self.backward(plan, batch, stop - first, size))
        total = sum(count for _, count in passed)
        whole = size if self.task.reduction == "sum" else size / total
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= whole / self.loss_scale(plan)
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip_norm)
        self.optimizer.step()
        if self.scheduler and self.task.scheduler_per == "step":
            self.scheduler.step()
        self.losses.append(sum(loss * count for loss, count in passed) / total)

    def backward(self, plan: Plan, batch: Any, samples: int, size: int) -> tuple[float, float]:
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(_precision(plan))
        with nullcontext() if kind is None else torch.autocast("cpu", kind):
            returned = self.task.loss(self.model, batch)
        mean, count = returned if isinstance(returned, tuple) else (returned, samples)
        if self.task.reduction == "sum":
            mean = mean / samples
        (mean * (float(count) / size) * self.loss_scale(plan)).backward()
        return float(mean.detach()), float(count)

    def loss_scale(self, plan: Plan) -> float:
        return 65536.0 if _precision(plan) == "fp16" else 1.0

    def validate(self) -> None:
        samples = open_validation(self.task, SEED)
        batch = samples.fetch(range(len(samples)))
        self.model.eval()
        with torch.no_grad():
            for name, measured in {"loss": self.task.loss, **self.task.metrics}.items():
                returned = measured(self.model, batch)
                self.metrics[name] = float(returned[0] if isinstance(returned, tuple) else returned)
        self.model.train()


def _precision(plan: Plan) -> str:
    return plan.amp[0] if len(set(plan.amp)) == 1 else "off"


def flat(tensors: Any) -> torch.Tensor:
    """Every number of some tensors, as doubles."""
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in (t.detach() for t in tensors)]
    return torch.cat([part.double().flatten() for part in parts])


def uniform_mean(task: hk.Task, shares: tuple[int, ...], unused: bool) -> Any:
    """Returns a function for ranks: the gradient of a step that plain DDP makes of their shares."""

    def run(worker: Any) -> torch.Tensor:
        plain = Plain(task)
        wrapped = torch.nn.parallel.DistributedDataParallel(
            plain.model, find_unused_parameters=unused
        )
        batch = plain.batch(0, sum(shares[: worker.rank]), shares[worker.rank])
        returned = task.loss(_Face(wrapped), batch)
        (returned[0] if isinstance(returned, tuple) else returned).backward()
        return flat(p.grad for p in plain.model.parameters() if p.grad is not None)

    return run


class _Face:
    """DDP's wrapper for a loss that looks into the model."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __call__(self, batch: Any) -> Any:
        return self._wrapped(batch)

    def __getitem__(self, place: int) -> Any:
        return self._wrapped.module[place]
