import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.launch.messages import StepRow
from hetkit.planning.time_split import Stamps
from hetkit.records.assembly import StepAssembly


def make_row(step: int = 0, *, start: float = 100.0, end: float = 101.0, **given) -> StepRow:
    stamps = Stamps(
        start=start,
        end=end,
        cut=start + 0.6,
        data_s=0.1,
        optimizer_s=0.1,
        codec_s=0.0,
        collectives=((start + 0.6, end - 0.2),),
    )
    values = {"epoch": 0, "batch": 8, "micro_steps": 1, "loss_sum": 8.0, "count": 8.0}
    return StepRow(step=step, stamps=stamps, **{"wire_bytes": 64.0, **values, **given})


def test_a_step_is_whole_when_its_last_rank_has_reported():
    assembly = StepAssembly([0, 1])
    assert assembly.add(1, [make_row(0), make_row(1)]) == []
    ((record, rows),) = assembly.add(0, [make_row(0, batch=24)])
    assert (record.step, record.samples) == (0, 32)
    assert [row.batch for row in rows] == [24, 8]
    assert [rank.rank for rank in record.ranks] == [0, 1]


@given(data=st.data(), ranks=st.integers(1, 4), steps=st.integers(1, 12))
def test_whole_steps_come_out_once_and_in_order_however_the_rows_arrive(data, ranks, steps):
    assembly = StepAssembly(range(ranks))
    next_step = [0] * ranks
    out = []
    while min(next_step) < steps:
        behind = [rank for rank in range(ranks) if next_step[rank] < steps]
        rank = data.draw(st.sampled_from(behind))
        stop = data.draw(st.integers(next_step[rank] + 1, steps))
        out += assembly.add(rank, [make_row(step) for step in range(next_step[rank], stop)])
        next_step[rank] = stop
    assert [record.step for record, _ in out] == list(range(steps))


def test_the_loss_is_the_mean_over_all_that_counts():
    assembly = StepAssembly([0, 1])
    assembly.add(0, [make_row(batch=30, loss_sum=60.0, count=30.0)])
    ((record, _),) = assembly.add(1, [make_row(batch=10, loss_sum=10.0, count=10.0)])
    assert record.loss == pytest.approx(70 / 40)
    assert [rank.loss for rank in record.ranks] == [2.0, 1.0]


def test_a_rank_without_samples_has_no_loss_of_its_own():
    assembly = StepAssembly([0, 1])
    assembly.add(0, [make_row(batch=0, micro_steps=0, loss_sum=0.0, count=0.0)])
    ((record, _),) = assembly.add(1, [make_row(loss_sum=16.0)])
    assert (record.loss, record.ranks[0].loss, record.ranks[0].batch) == (2.0, None, 0)


def test_a_step_in_which_nothing_counts_has_no_loss():
    ((record, _),) = StepAssembly([0]).add(0, [make_row(loss_sum=0.0, count=0.0)])
    assert record.loss is None


def test_missing_readings_stay_missing_and_what_was_measured_stays():
    row = make_row(memory_bytes=None, memory_peak_bytes=5.0, skipped=True, epoch=3)
    ((record, _),) = StepAssembly([0]).add(0, [row])
    rank = record.ranks[0]
    assert (rank.memory_bytes, rank.memory_peak_bytes, rank.wire_bytes) == (None, 5.0, 64.0)
    assert (record.skipped, record.epoch) == (True, 3)


def test_time_counts_from_the_first_start_of_any_rank():
    assembly = StepAssembly([0, 1])
    assembly.add(0, [make_row(start=100.5, end=102.0), make_row(1, start=102.0, end=103.0)])
    whole = assembly.add(1, [make_row(start=100.0, end=102.5), make_row(1, start=102.5, end=103.5)])
    assert assembly.origin == 100.0
    assert [record.time_s for record, _ in whole] == [2.5, 3.5]
    later = StepAssembly([0], origin=assembly.origin)
    ((record, _),) = later.add(0, [make_row(2, start=104.0, end=105.0)])
    assert record.time_s == 5.0


def test_waiting_is_told_from_transfer_by_the_last_arrival():
    early = make_row(start=100.0, end=101.5)
    late = StepRow(
        step=0,
        epoch=0,
        batch=8,
        micro_steps=1,
        stamps=Stamps(
            start=100.0,
            end=101.5,
            cut=101.0,
            data_s=0.0,
            optimizer_s=0.1,
            codec_s=0.0,
            collectives=((101.0, 101.3),),
        ),
        loss_sum=1.0,
        count=1.0,
        wire_bytes=0.0,
    )
    for order in itertools.permutations([(0, early), (1, late)]):
        assembly = StepAssembly([0, 1])
        whole = [done for rank, row in order for done in assembly.add(rank, [row])]
        first, second = whole[0][0].ranks
        assert first.wait_s == pytest.approx(0.4)
        assert second.wait_s == pytest.approx(0.0)
        assert first.transfer_s == pytest.approx(second.transfer_s)


def test_the_guard_s_reading_is_that_of_the_worst_rank():
    assembly = StepAssembly([0, 1, 2])
    assembly.add(0, [make_row(0, guard_cosine=0.9, guard_error=0.4)])
    assembly.add(1, [make_row(0)])
    ((record, _),) = assembly.add(2, [make_row(0, guard_cosine=0.95, guard_error=0.5)])
    assert (record.guard_cosine, record.guard_error) == (0.9, 0.5)
