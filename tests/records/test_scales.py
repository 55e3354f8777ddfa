from dataclasses import replace

import pytest

import hetkit as hk
from hetkit.plan import Plan
from hetkit.planning.course import Course
from hetkit.planning.schedule import Position, make_plan
from hetkit.records.book import Book
from hetkit.records.history import History
from hetkit.records.ledger import Ledger
from hetkit.records.scales import Scales


class Bench:
    """Scales over a course that stands at step 0, and the plans that it would make."""

    def __init__(self, devices: int, **settings) -> None:
        fleet = hk.emulate(f"{devices}xV100", pace={"V100": 1.0})
        asked = hk.Settings(global_batch=12 * devices, **settings)
        self.course = Course(fleet, asked)
        self.position = Position(epoch=0, step=0, epoch_first_step=0, samples=1200)
        self.course.stand(self.position, caps=None)
        self.book = Book(History(fleet.labels, [True] * devices), Ledger(fleet.labels))
        self.scales = Scales(self.course, self.book)

    def plan(self, *, step: int = 0, **changes) -> Plan:
        settings = replace(self.course.settings, **changes)
        at = replace(self.position, step=step)
        return make_plan(settings, self.course.devices, at, version=1, reason="test")

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.book.history.events]


def test_an_epoch_under_measurement_says_so_once():
    bench = Bench(2, batches="auto")
    first = bench.plan()
    bench.scales.on_plan(None, first)
    bench.scales.on_plan(first, bench.plan(step=3))
    (text,) = bench.texts
    assert text.startswith("measuring")


@pytest.mark.parametrize("batches", ["even", (12, 12)])
def test_a_split_of_the_users_is_not_under_measurement(batches):
    bench = Bench(2, batches=batches)
    bench.scales.on_plan(None, bench.plan())
    assert not bench.texts
    assert bench.scales.hold_at is None


def test_the_exchange_of_fewer_ranks_sends_fewer_bytes():
    scales = Bench(4, batches="even").scales
    scales.overhead.exchange_s = 0.3
    assert scales.exchange_s(4) == pytest.approx(0.3)
    assert scales.exchange_s(2) == pytest.approx(0.2)  # 2(n − 1)/n: 1.5 → 1
    assert scales.exchange_s(1) == 0.0
    assert Bench(1, batches="even").scales.exchange_s(1) == 0.0


def test_nothing_is_known_of_devices_that_never_ran():
    scales = Bench(3, batches="auto").scales
    scales.seat([0, 2])
    assert scales.models() is None
    assert scales.error == 0.0
    assert not scales.decisions
