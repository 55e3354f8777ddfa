import os
import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hetkit.errors import DataError
from hetkit.worker.data import open_samples
from hetkit.worker.loader import Loader
from hetkit.worker.order import Draw

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Noisy(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        return index, random.random(), torch.rand(2)


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(100):
            yield number, float(torch.rand(()))

    def __len__(self) -> int:
        return 100


class Loaders:
    def __init__(self) -> None:
        self.made: list[Loader] = []

    def __call__(self, *arguments, **more) -> Loader:
        self.made.append(Loader(*arguments, **more))
        return self.made[-1]


@pytest.fixture
def make():
    """Makes loaders, and ends their processes."""
    loaders = Loaders()
    yield loaders
    while loaders.made:
        loader = loaders.made.pop()
        # The frames of a raised error hold its iterator, in a circle: collected, it takes seconds.
        end = getattr(loader._batches, "_shutdown_workers", None)
        loader.close()
        if end is not None:
            end()


def draws(*micro_batches: list[int], epoch: int = 0) -> list[Draw]:
    return [Draw(indices, epoch) for indices in micro_batches]


SCHEDULES = (
    draws([0, 5], [1], [2, 3, 4]),
    draws([5, 4], [3], epoch=1),
    draws([0], [1], [2], epoch=2),
)


@pytest.mark.parametrize("data", [(X, Y), Noisy()], ids=["arrays", "augmenting dataset"])
def test_worker_processes_fetch_what_the_rank_itself_would(data, make):
    samples = open_samples(data, None)
    inside, outside = make(samples, 0), make(samples, 2)
    for schedule in SCHEDULES:
        inside.start(schedule)
        outside.start(schedule)
        for _ in schedule[:-1]:  # the last is fetched ahead, and dropped by the next plan
            assert str(outside.next()) == str(inside.next())


def test_a_draw_of_a_sample_that_came_before_is_augmented_anew(make):
    for num_workers in (0, 1):
        loader = make(open_samples(Noisy(), list), num_workers)
        loader.start([Draw([3, 3], 0, [0, 1]), Draw([3], 0, [1])])
        (once, again), (alone,) = loader.next(), loader.next()
        assert once[1] != again[1] == alone[1]


def test_a_stream_is_read_by_one_process_at_most(make):
    with pytest.raises(DataError, match="num_workers is 2: give 1 to read ahead, or 0"):
        make(open_samples(Stream(), None), 2)


def test_a_stream_in_a_process_of_its_own_gives_what_the_rank_would_read(make):
    schedules = [draws([0, 1], [6, 7], [12]), draws([8], [9, 10]), draws([2], [3], epoch=1)]
    samples = open_samples(Stream(), None)
    samples.fetch([0, 1, 2])  # the probe's
    outside, inside = make(samples, 1), make(open_samples(Stream(), None), 0)
    for schedule in schedules:
        inside.start(schedule)
        outside.start(schedule)
        for _ in schedule:
            assert str(outside.next()) == str(inside.next())


def test_a_rank_without_samples_may_have_nothing_to_load(make):
    for num_workers in (0, 1):
        loader = make(open_samples((X, Y), None), num_workers)
        loader.start([])
        loader.start(draws([2]))
        assert loader.next()[1].tolist() == [2]


def test_the_order_is_made_as_it_is_used(make):
    loader = make(open_samples((X, Y), None), 0)
    loader.start(Draw([step % 6], 0) for step in iter(int, 1))
    assert loader.next()[1].tolist() == [0]


class Failing(Noisy):
    def __getitem__(self, index: int):
        raise LookupError(f"no sample in process {os.getpid()}")


def test_an_error_in_a_worker_process_is_the_users_own(make):
    loader = make(open_samples(Failing(), None), 1)
    loader.start(draws([1]))
    with pytest.raises(LookupError, match="no sample in process"):
        loader.next()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_memory_holds_the_same_batches(num_workers, make):
    loader = make(open_samples((X, Y), None), num_workers, pin_memory=True)
    for _ in range(2):
        loader.start(draws([1, 2], [3]))
        batch = loader.next()
        assert batch[1].tolist() == [1, 2]
        assert batch[0].is_pinned() == torch.cuda.is_available()
