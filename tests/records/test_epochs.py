import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.records.epochs import SPLIT, LedgerRow, summarise_epoch


def test_an_epoch_s_figures(rank_step, record):
    records = [
        record(
            10 + index,
            ranks=(
                rank_step(0, step_s=step_s, compute_s=0.1 * step_s, memory_peak_bytes=5.0 + index),
                rank_step(1, step_s=step_s, compute_s=0.4 * step_s, wire_bytes=9000.0),
            ),
            loss=loss,
        )
        for index, (step_s, loss) in enumerate([(9.0, 4.0), (1.0, 2.0), (2.0, None)])
    ]
    summary = summarise_epoch(records)
    assert (summary.first_step, summary.last_step) == (10, 12)
    assert summary.seconds == 12.0
    assert summary.samples_per_s == 3 * 64 / 12
    assert summary.step_s == 2.0
    assert summary.compute_s == pytest.approx((0.2, 0.8))
    assert summary.critical_rank == 1
    assert summary.compute_spread == pytest.approx(0.75)
    assert summary.comm_share == pytest.approx(0.2)
    assert summary.wire_bytes == 9000.0
    assert summary.memory_peak_bytes == (7.0, None)
    assert summary.loss == 3.0


def test_of_local_steps_the_means_count_and_a_ranks_own_steps_add_up(rank_step, record):
    """Rank 0 is slow in one step and rank 1 in the other: neither waited for the other."""
    records = [
        record(step, ranks=(rank_step(0, step_s=a, wire_bytes=w), rank_step(1, step_s=b)))
        for step, (a, b, w) in enumerate([(3.0, 1.0, 0.0), (1.0, 3.5, 9000.0)])
    ]
    summary = summarise_epoch(records, sync_every=2)
    assert summary.seconds == 4.5
    assert summary.wire_bytes == 4500.0
    assert summary.optimizer_s == pytest.approx((0.2, 0.225))


def test_skipped_steps_count_in_all_but_are_told(record):
    summary = summarise_epoch([record(0), record(1, skipped=True)])
    assert summary.skipped_steps == 1
    assert summary.samples == 128


def test_no_loss_is_none_not_zero(record):
    assert summarise_epoch([record(0, loss=None)]).loss is None


def test_the_loss_is_weighted_by_samples(record):
    assert (
        summarise_epoch([record(0, loss=1.0, samples=96), record(1, loss=5.0, samples=32)]).loss
        == 2
    )


def test_noise_of_balanced_ranks_is_no_spread(rank_step, record):
    noise = [(1.0, 1.2), (1.2, 1.0), (1.1, 1.1)]
    records = [
        record(step, ranks=(rank_step(0, compute_s=a), rank_step(1, compute_s=b)))
        for step, (a, b) in enumerate(noise)
    ]
    assert summarise_epoch(records).compute_spread == 0.0


def test_a_rank_without_samples_is_no_spread(rank_step, record):
    ranks = (rank_step(0, compute_s=0.2), rank_step(1, compute_s=0.0, batch=0))
    assert summarise_epoch([record(0, ranks=ranks)]).compute_spread == 0.0


def test_a_lost_rank_keeps_the_figures_of_its_steps(rank_step, record):
    summary = summarise_epoch(
        [
            record(0, ranks=(rank_step(0), rank_step(1, compute_s=5.0))),
            record(1, ranks=(rank_step(0),)),
        ]
    )
    assert summary.compute_s[1] == 5.0
    assert summary.critical_rank == 1


@given(durations=st.lists(st.floats(1e-3, 10), min_size=1, max_size=40))
def test_throughput_is_total_over_total_whatever_the_steps(rank_step, record, durations):
    records = [
        record(step, ranks=(rank_step(step=step, step_s=step_s),))
        for step, step_s in enumerate(durations)
    ]
    summary = summarise_epoch(records)
    assert summary.samples_per_s == pytest.approx(32 * len(durations) / sum(durations))
    assert summary.step_s == statistics.median(durations)
    assert min(durations) <= summary.step_s <= max(durations)


@pytest.mark.parametrize("epochs", [(), (0, 1)])
def test_one_epoch_at_a_time(record, epochs):
    with pytest.raises(ValueError, match="steps of one epoch, at least one"):
        summarise_epoch([record(step, epoch=epoch) for step, epoch in enumerate(epochs)])


def test_a_row_is_frozen_and_holds_plan_and_measurement(row):
    made = row(3, batches=(48, 16), amp=("bf16", "fp16"), metrics={"accuracy": 0.9})
    assert isinstance(made, LedgerRow)
    assert (made.epoch, made.global_batch, made.batches) == (3, 64, (48, 16))
    assert all(len(getattr(made, f"{part}_s")) == 2 for part in SPLIT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.epoch = 4


@pytest.mark.parametrize(
    ("batches", "even"), [((32, 32), True), ((33, 32), True), ((34, 32), False), ((64,), False)]
)
def test_which_split_is_even(row, batches, even):
    assert row(batches=batches).even is even


def test_the_guard_s_worst_reading_is_the_epoch_s(record):
    looked = [record(1, guard_cosine=0.95, guard_error=0.3), record(2, guard_cosine=0.8)]
    summary = summarise_epoch([record(0), *looked])
    assert (summary.guard_cosine, summary.guard_error) == (0.8, 0.3)
    assert summarise_epoch([record(0)]).guard_cosine is None


def test_an_epoch_knows_its_noise(record):
    assert summarise_epoch([record(step) for step in range(3)]).noise == {}
    assert summarise_epoch([record(step) for step in range(8)]).noise["step_s"].blocks == 8
