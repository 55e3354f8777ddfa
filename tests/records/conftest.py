"""Makers of steps, plans and rows with plausible figures; every figure can be given."""

from collections.abc import Callable
from typing import Any

import pytest

from hetkit.plan import Plan
from hetkit.records.epochs import LedgerRow, summarise_epoch
from hetkit.records.steps import RankStep, StepRecord

SHARES = {
    "data_s": 0.05,
    "wait_s": 0.0,
    "transfer_s": 0.15,
    "codec_s": 0.05,
    "optimizer_s": 0.1,
    "other_s": 0.01,
    "overlapped_s": 0.2,
}


def make_rank_step(rank: int = 0, *, step: int = 0, step_s: float = 0.2, **given: Any) -> RankStep:
    parts = {name: share * step_s for name, share in SHARES.items()}
    parts["compute_s"] = step_s - sum(parts.values()) + parts["overlapped_s"]
    values = {"epoch": 0, "time_s": 0.2 * step, "batch": 32, "wire_bytes": 4096.0, "loss": 1.0}
    return RankStep(rank=rank, step=step, step_s=step_s, **{**values, **parts, **given})


def make_record(step: int = 0, *, ranks: tuple[RankStep, ...] | None = None, **given: Any):
    ranks = ranks or (make_rank_step(0, step=step), make_rank_step(1, step=step))
    values = {
        "epoch": ranks[0].epoch,
        "time_s": 0.2 * step,
        "samples": sum(rank.batch for rank in ranks),
        "loss": 1.0,
        "skipped": False,
    }
    return StepRecord(step=step, ranks=ranks, **{**values, **given})


def make_row(epoch: int = 0, *, batches: tuple[int, ...] = (32, 32), step_s: float = 0.2, **given):
    ranks = tuple(
        make_rank_step(rank, step=epoch, step_s=step_s, batch=batch, epoch=epoch)
        for rank, batch in enumerate(batches)
    )
    plan = Plan(
        version=1,
        epoch=epoch,
        first_step=epoch,
        epoch_first_step=epoch,
        epoch_steps=1,
        global_batch=sum(batches),
        batches=batches,
        micro_batches=tuple(max(1, batch) for batch in batches),
        amp=given.pop("amp", ("off",) * len(batches)),
        compression=given.pop("compression", "none"),
    )
    summary = summarise_epoch([make_record(epoch, ranks=ranks)])
    return LedgerRow.of(summary, plan, **{"emulated": True, **given})


@pytest.fixture(scope="session")
def rank_step() -> Callable[..., RankStep]:
    return make_rank_step


@pytest.fixture(scope="session")
def record() -> Callable[..., StepRecord]:
    return make_record


@pytest.fixture(scope="session")
def row() -> Callable[..., LedgerRow]:
    return make_row
