"""Validation in an own loop: the user's metrics over every sample once, spread over the ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetkit.planning.batch_split import ratio_split
from hetkit.worker.data import Samples, to_device
from hetkit.worker.loss import measure
from hetkit.worker.order import micro_batches

Pairs = dict[str, tuple[float, float]]
"""Each metric as ``(sum, count)``."""


class Totals:
    """What was measured in an epoch; what is measured again replaces what was.

    Example:
        >>> totals = Totals()
        >>> totals.add({"accuracy": (3.0, 4.0)})
        >>> totals.pairs
        {'accuracy': (3.0, 4.0)}
    """

    def __init__(self) -> None:
        self.pairs: Pairs = {}

    def add(self, pairs: Pairs) -> None:
        """Takes metrics in."""
        self.pairs.update(pairs)


def measure_share(
    models: Sequence[torch.nn.Module],
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    samples: Samples,
    *,
    rank: int,
    batches: Sequence[int],
    largest: int,
    device: torch.device,
) -> Pairs:
    """Measures metrics on this rank's share of the samples.

    Args:
        models: The wrapped models; the metrics get the first.
        metrics: Name to ``metric(model, batch)``.
        samples: All samples.
        rank: This rank.
        batches: The ranks' shares are in these proportions.
        largest: Largest batch.
        device: Where the models are.
    """
    shares = ratio_split(batches, len(samples))
    totals: Pairs = dict.fromkeys(metrics, (0.0, 0.0))
    training = [model.training for model in models]
    for model in models:
        model.eval()
    with torch.no_grad():
        for start, stop in micro_batches(sum(shares[:rank]), shares[rank], largest):
            batch = to_device(samples.fetch(range(start, stop)), device)
            for name, metric in metrics.items():
                mean, count, _ = measure(metric(models[0], batch), stop - start, name=name)
                total, before = totals[name]
                totals[name] = (total + (float(mean) * count if count else 0.0), before + count)
    for model, was in zip(models, training, strict=True):
        model.train(was)
    return totals
