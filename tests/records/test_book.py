import math

import pytest

from hetkit.launch.messages import StepRow
from hetkit.plan import Plan
from hetkit.planning.time_split import Stamps
from hetkit.records.book import Book, Overhead, combine
from hetkit.records.forecast import Kept
from hetkit.records.history import History
from hetkit.records.ledger import Ledger

PLAN = Plan(
    version=1,
    epoch=0,
    first_step=0,
    epoch_first_step=0,
    epoch_steps=4,
    global_batch=16,
    batches=(8, 8),
    micro_batches=(8, 8),
    amp=("off", "off"),
    compression="none",
)


def make_row(step: int, **given) -> StepRow:
    times = {"data_s": 0.0, "optimizer_s": 0.1, "codec_s": 0.0, "collectives": ()}
    stamps = Stamps(start=float(step), end=step + 0.5, cut=step + 0.4, **times)
    values = {"epoch": 0, "batch": 8, "micro_steps": 1, "loss_sum": 8.0, "count": 8.0}
    return StepRow(step=step, stamps=stamps, **{"wire_bytes": 64.0, **values, **given})


@pytest.fixture
def book() -> Book:
    labels = ("A", "B")
    made = Book(History(labels, [True, True]), Ledger(labels))
    made.begin_epoch(["amp: off → bf16"])
    return made


def take(book: Book, *steps: int, **given) -> None:
    for rank in (0, 1):
        book.take(rank, [make_row(step, **given) for step in steps])


def end(book: Book, reports=()):
    return book.end_epoch(
        PLAN,
        reports,
        emulated=True,
        forecast=Kept(predicted=None, measured_s=None),
        spread_floor=0.01,
    )


def test_an_epoch_becomes_one_row_with_what_was_switched_and_what_happened(book):
    take(book, 0, 1, 2, lr=0.2)
    take(book, 3, lr=0.1)
    book.note("settings", "amp: off → bf16")
    book.note("plan", "split [9, 7]")
    row = end(book, [{"loss": (3.0, 2.0)}, {"loss": (1.0, 2.0)}])
    assert (row.epoch, row.first_step, row.last_step) == (0, 0, 3)
    assert row.changes == ("amp: off → bf16",)
    assert row.events == ("split [9, 7]",), "settings stand under changes, epochs speak for them"
    assert (row.metrics, row.lr, row.emulated) == ({"loss": 1.0}, 0.1, True)
    assert list(book.ledger) == [row]
    assert len(book.history) == 4


def test_an_epoch_without_steps_has_no_row(book):
    assert end(book) is None
    assert len(book.ledger) == 0


def test_the_next_epoch_starts_with_an_empty_account(book):
    take(book, 0, 1)
    book.note("notice", "hm")
    end(book)
    book.begin_epoch([])
    take(book, 2, 3, epoch=1)
    row = end(book)
    assert (row.epoch, row.first_step, row.changes, row.events) == (1, 2, (), ())


def test_an_epoch_that_is_done_again_keeps_what_happened_and_what_was_switched(book):
    take(book, 0, 1, 2)
    book.note("failure", "rank 1 (B) died")
    book.take(0, [make_row(3, loss_sum=800.0)])  # rank 1 never said its part
    book.roll_back(0)
    book.note("recovery", "training goes on from step 0")
    book.begin_epoch([])
    take(book, 0, 1, 2, 3)
    row = end(book)
    assert row.changes == ("amp: off → bf16",)
    assert row.events == ("rank 1 (B) died", "training goes on from step 0")
    assert (row.first_step, row.last_step, row.loss) == (0, 3, 1.0)
    assert book.history.series("step")[1].tolist() == [0, 1, 2, 3]


def test_an_epoch_that_goes_on_in_its_middle_counts_each_step_once(book):
    """A death in an epoch that had begun from a mid-epoch checkpoint counted its steps twice."""
    take(book, 0, 1, 2, 3)
    book.roll_back(2)
    take(book, 2, 3, 4)
    row = end(book)
    assert (row.first_step, row.last_step, row.samples) == (0, 4, 5 * row.global_batch)


def test_what_is_left_of_ended_workers_is_no_part_of_later_steps(book):
    book.take(1, [make_row(0, loss_sum=800.0)])
    book.begin_epoch([])  # no roll-back: the user ran again after a failure
    assert book.take(0, [make_row(0)]) == []
    ((record, _),) = book.take(1, [make_row(0)])
    assert record.loss == 1.0


def test_a_skipped_step_is_noted_where_it_was(book):
    take(book, 0)
    take(book, 1, skipped=True)
    (event,) = book.history.events
    assert (event.kind, event.step) == ("skip", 1)
    assert end(book).events == (event.text,)


def test_skipped_steps_are_events_each_and_one_note_in_the_ledger(book):
    take(book, 0, 1, 2, skipped=True)
    assert [event.step for event in book.history.events] == [0, 1, 2]
    assert end(book).events == ("a gradient was not finite: all ranks skipped the step (3 times)",)


def test_of_local_steps_the_rank_that_skipped_is_named(book):
    book.take(0, [make_row(0)])
    book.take(1, [make_row(0, skipped=True)])
    (event,) = book.history.events
    assert "rank 1 skipped" in event.text
    assert end(book).skipped_steps == 1


def test_a_loss_that_is_not_finite_is_one_event_an_epoch_and_rank_and_counted(book):
    for step, loss_sum in enumerate([8.0, math.nan, math.inf, 8.0, math.nan]):
        book.take(0, [make_row(step)])
        book.take(1, [make_row(step, loss_sum=loss_sum)])
    ((event),) = book.history.events
    assert (event.kind, event.step, event.rank) == ("notice", 1, 1)
    assert end(book).events == ("the loss of rank 1 was not finite (3 times)",)
    book.begin_epoch([])
    book.take(0, [make_row(5, epoch=1, loss_sum=math.nan)])
    book.take(1, [make_row(5, epoch=1)])
    assert [(e.step, e.rank) for e in book.history.events] == [(1, 1), (5, 0)]
    assert end(book).events == ("the loss of rank 0 was not finite",)


def test_the_loss_scale_and_the_rate_are_in_history_and_ledger(book):
    take(book, 0, 1, loss_scale=512.0, lr=0.2)
    take(book, 2, loss_scale=256.0, lr=0.1, skipped=True)
    assert book.history.series("loss_scale")[1].tolist() == [512.0, 512.0, 256.0]
    assert book.history.series("lr")[1].tolist() == [0.2, 0.2, 0.1]
    row = end(book)
    assert (row.loss_scale, row.lr, row.skipped_steps) == (256.0, 0.1, 1)


def test_an_event_belongs_to_the_latest_step_unless_it_says_so(book):
    book.note("notice", "before the first step")
    take(book, 0, 1)
    book.note("notice", "now")
    book.note("failure", "there", step=7, epoch=2, rank=1)
    events = book.history.events
    assert [(e.step, e.epoch, e.rank) for e in events] == [(0, 0, None), (1, 0, None), (7, 2, 1)]
    assert events[0].time_s == 0.0


def test_the_recent_step_is_the_median_of_a_few(book):
    assert book.recent_step_s() is None
    take(book, *range(3))
    assert book.recent_step_s() == pytest.approx(0.5)


def test_metrics_count_each_sample_once():
    assert combine([]) == {}
    assert combine([{"a": (9.0, 3.0)}, {"a": (1.0, 1.0)}]) == {"a": 2.5}
    assert combine([{"a": (0.0, 0.0)}, {"a": (4.0, 2.0)}]) == {"a": 2.0}
    assert combine([{"a": (0.0, 0.0)}]) == {}, "a mean of nothing is no figure"
    assert math.isnan(combine([{"a": (math.nan, 2.0)}])["a"])


def test_the_overhead_is_what_the_critical_rank_does_beside_computing(record, rank_step):
    fast = rank_step(0, step_s=1.0, compute_s=0.3, wait_s=0.5, transfer_s=0.1, codec_s=0.0)
    slow = rank_step(1, step_s=1.0, compute_s=0.8, wait_s=0.0, transfer_s=0.1, codec_s=0.02)
    overhead = Overhead()
    overhead.add(record(ranks=(fast, slow)))
    assert overhead.all_s == pytest.approx(0.2)
    assert overhead.exchange_s == pytest.approx(0.12)
    for _ in range(100):
        overhead.add(record(ranks=(rank_step(0, step_s=1.0, compute_s=0.9), fast)))
    assert overhead.all_s == pytest.approx(0.1, rel=0.01)
