"""Validation: every sample once, spread over the ranks by the plan's split."""

import time
from typing import Any

import torch

from hetkit.planning.batch_split import ratio_split
from hetkit.task import Task
from hetkit.worker.data import Samples, to_device
from hetkit.worker.loss import measure
from hetkit.worker.order import micro_batches


def evaluate(
    task: Task,
    model: torch.nn.Module,
    samples: Samples,
    *,
    rank: int,
    batches: tuple[int, ...],
    micro_batch: int,
    device: torch.device,
) -> tuple[dict[str, tuple[float, float]], float]:
    """Measures the loss and the metrics on this rank's share of the validation set.

    Runs in float32 whatever the training's precision, so that the figure is the same as one
    process's; only layers that take their batch's statistics in eval mode too (BatchNorm without
    running ones) depend on the split. An emulated device evaluates at the machine's own pace.

    Returns:
        Name to ``(sum, count)``, the validation loss under ``"loss"``; and the seconds it took.
    """
    began = time.monotonic()
    shares = ratio_split(batches, len(samples))
    totals = dict.fromkeys(("loss", *task.metrics), (0.0, 0.0))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start, stop in micro_batches(sum(shares[:rank]), shares[rank], micro_batch):
            batch = to_device(samples.fetch(range(start, stop)), device)
            for name, measured in _measure_all(task, model, batch, stop - start).items():
                total, count = totals[name]
                totals[name] = (total + measured[0], count + measured[1])
    model.train(was_training)
    return totals, time.monotonic() - began


def _measure_all(
    task: Task, model: torch.nn.Module, batch: Any, size: int
) -> dict[str, tuple[float, float]]:
    functions = {"loss": task.loss, **task.metrics}
    results = {}
    for name, function in functions.items():
        reduction = task.reduction if name == "loss" else "mean"
        mean, count, _ = measure(function(model, batch), size, name=name, reduction=reduction)
        results[name] = (float(mean) * count if count else 0.0, count)
    return results
