"""The noise of an epoch's figures, from its own steps.

Steps that follow each other are alike (a hot device, another program for a while), so the scatter
of single steps tells too little. The epoch is cut into blocks of equally many steps instead, and
the figure is taken of each block, by the very rule that the ledger takes it of the epoch (a median,
or a mean)::

    steps   │▪▪▪▪▪│▪▪▪▪▪│▪▪▪▪▪│ …     k blocks, figures m₁ … m_k
    standard error of the epoch's figure  ≈  s(m) / √k

This is the method of batch means (Law and Carson 1979): what is alike within a block does not make
the error too small. A trend within the epoch, such as that of the loss, counts as noise, so errors
are rather too large than too small.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from hetkit.records.steps import RankStep, StepRecord

MOST_BLOCKS = 20
FEWEST_BLOCKS = 6
"""Fewer say too little of their own scatter."""

_OF_ALL = ("samples_per_s", "step_s", "wire_bytes", "loss")
_OF_CRITICAL = (
    *("data_s", "compute_s", "wait_s", "transfer_s", "codec_s", "optimizer_s", "other_s"),
    "comm_share",
)

_MEANS = ("samples_per_s", "loss")
"""Figures that the ledger takes over the whole epoch, whatever is typical of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How well a figure is known.

    Args:
        error: Its standard error, in its own unit.
        blocks: How many blocks of steps it comes from.

    Example:
        >>> Noise(error=0.002, blocks=20).blocks
        20
    """

    error: float
    blocks: int


def measure_noise(
    records: Sequence[StepRecord],
    critical: Sequence[RankStep],
    typical: Callable[[Iterable[float]], float],
) -> dict[str, Noise]:
    """Returns the noise of each figure, by field; the parts of a step are the critical rank's.

    Figures with readings in fewer than 6 steps are left out.

    Args:
        records: An epoch's steps, oldest first.
        critical: The steps of the epoch's critical rank, oldest first.
        typical: How the epoch's figures are taken: the median or the mean.
    """
    found = {}
    for steps, names in ((records, _OF_ALL), (critical, _OF_CRITICAL)):
        for name in names:
            values = [getattr(step, name) for step in steps]
            known = [value for value in values if value is not None]
            noise = block_noise(known, fmean if name in _MEANS else typical)
            if noise is not None:
                found[name] = noise
    return found


def block_noise(
    values: Sequence[float], typical: Callable[[Iterable[float]], float]
) -> Noise | None:
    """Returns the noise of ``typical(values)``; None of fewer than 6 values.

    Example:
        >>> from statistics import median
        >>> noise = block_noise([1.0, 3.0] * 20, median)
        >>> noise
        Noise(error=0.0, blocks=20)
    """
    blocks = min(MOST_BLOCKS, len(values))
    if blocks < FEWEST_BLOCKS or not all(map(math.isfinite, values)):
        return None
    ends = [round(block * len(values) / blocks) for block in range(blocks + 1)]
    figures = [typical(values[ends[i] : ends[i + 1]]) for i in range(blocks)]
    return Noise(error=stdev(figures) / math.sqrt(blocks), blocks=blocks)
