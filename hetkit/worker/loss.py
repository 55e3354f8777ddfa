"""What a user's loss returned: a mean over samples, (mean, count) over something else, or a sum."""

import math
from numbers import Real
from typing import Any

import torch

from hetkit.errors import LossError


def measure(
    returned: Any, samples: int, *, name: str = "loss", reduction: str = "mean"
) -> tuple[Any, float, bool]:
    """Reads the return value of a loss or metric.

    Args:
        returned: A scalar (tensor or number), the mean over the samples; or ``(mean, count)``.
        samples: Samples in the batch.
        name: For messages.
        reduction: ``"sum"``: the scalar is the sum over the samples, and nothing else is allowed.

    Returns:
        The mean as it was given, its denominator, and whether the user gave that denominator.
        With a count of 0 the mean is of nothing (often NaN): do not use it.

    Raises:
        LossError: It is not a scalar, or the count is negative or not finite.
    """
    counted = isinstance(returned, (tuple, list)) and len(returned) == 2
    if counted and reduction == "sum":
        raise LossError(
            f'{name} returned a pair, and the task has reduction="sum": return the sum alone, or '
            '(mean, count) with reduction="mean".'
        )
    mean, count = returned if counted else (returned, samples)
    if isinstance(mean, torch.Tensor):
        if mean.numel() != 1:
            raise LossError(
                f"{name} returned a tensor of shape {tuple(mean.shape)}: "
                "return its mean over the batch as a scalar, or (mean, count)."
            )
        mean = mean.reshape(())
    elif not isinstance(mean, Real):
        raise LossError(
            f"{name} returned {type(mean).__name__}: return a scalar tensor, or (mean, count)."
        )
    try:
        denominator = float(count)
    except (TypeError, ValueError, RuntimeError):
        denominator = float("nan")
    if not 0 <= denominator < float("inf"):
        raise LossError(
            f"{name} returned count {count!r}: it must be a finite number of at least 0."
        )
    if reduction == "sum" and samples:
        mean = mean / samples
    return mean, denominator, counted


def require_finite(mean: torch.Tensor) -> None:
    """Refuses a loss that is not finite from the start; later, such a step is skipped.

    Raises:
        LossError: It is not.
    """
    value = float(mean.detach())
    if not math.isfinite(value):
        raise LossError(
            f"the loss is {value} in the very first step: look at the data (NaN? not normalised?), "
            "the loss, and the initial weights."
        )
