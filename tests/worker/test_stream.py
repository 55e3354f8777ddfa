import itertools
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import hetkit as hk
from hetkit.errors import DataError
from hetkit.worker.agreement import fingerprint
from hetkit.worker.data import open_samples, open_validation
from hetkit.worker.stream import StreamSamples


class Shuffling(IterableDataset):
    """Shuffles in a buffer and adds noise, from all three global generators."""

    def __init__(self, length: int = 30) -> None:
        self.length = length
        self.opened = self.read = 0

    def __iter__(self):
        self.opened += 1
        offset = int(torch.randint(1000, ()))
        buffer = []
        for number in range(self.length):
            self.read += 1
            buffer.append(number)
            if len(buffer) == 5:
                random.shuffle(buffer)
                yield from ((offset, each, float(np.random.rand())) for each in buffer)
                buffer = []


def opened(**arguments) -> StreamSamples:
    return StreamSamples(Shuffling(), 30, list, **arguments)


@given(edges=st.lists(st.integers(0, 30), max_size=6), seed=st.integers(0, 3))
def test_every_cut_of_the_stream_reads_the_same_samples(edges, seed):
    whole = opened(seed=seed).fetch(range(30))
    edges = [0, *sorted(edges), 30]
    cut = opened(seed=seed)
    pieces = [cut.fetch(range(a, b)) for a, b in itertools.pairwise(edges) if a < b]
    assert [each for piece in pieces for each in piece] == whole
    assert cut.source.opened == 1
    assert sorted(each[1] for each in whole) == list(range(30))


@given(places=st.lists(st.integers(0, 29), min_size=1, unique=True).map(sorted))
def test_a_rank_that_skips_reads_what_it_would_have_read(places):
    whole = opened().fetch(range(30))
    assert opened().fetch(places) == [whole[place] for place in places]


def test_epochs_and_seeds_differ_and_going_back_reads_anew():
    samples = opened(seed=1)
    first = samples.fetch(range(10))
    assert samples.fetch(range(10), epoch=1) != first
    assert opened(seed=2).fetch(range(10)) != first
    assert samples.fetch(range(10)) == first
    assert samples.source.opened == 3


def test_the_steps_own_random_numbers_neither_disturb_nor_are_disturbed():
    expected = opened().fetch(range(30))
    samples = opened()
    torch.manual_seed(3)
    first = samples.fetch(range(12))
    drawn = torch.rand(3)
    assert first + samples.fetch(range(12, 30)) == expected
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


def test_collate_sees_only_what_is_kept_and_does_not_disturb_the_stream():
    seen = []

    def decode(rows):
        seen.extend(rows)
        random.random()
        return rows

    samples = StreamSamples(Shuffling(), 30, decode)
    samples.fetch([3])
    assert samples.fetch(range(20, 30)) == opened().fetch(range(30))[20:]
    assert len(seen) == 11


def test_a_forked_process_does_not_read_on_in_what_its_parent_opened(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"{number}\n" for number in range(3000)))

    def lines():
        with path.open(buffering=2) as file:  # hardly any: parent and child would mix at once
            yield from map(int, file)

    class Log:
        __iter__ = staticmethod(lines)

    samples = StreamSamples(Log(), 3000, list)
    assert samples.fetch(range(10)) == list(range(10))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        inherited.append(samples)
        try:
            assert pool.submit(read_inherited, 10, 2000).result(timeout=60) == list(range(10, 2000))
        finally:
            inherited.clear()
    assert samples.fetch(range(10, 3000)) == list(range(10, 3000))


inherited: list[StreamSamples] = []


def read_inherited(start: int, stop: int):
    return inherited[0].fetch(range(start, stop))


def test_the_first_samples_fingerprint_is_read_once_and_disturbs_nothing():
    samples, expected = opened(), opened().fetch(range(30))
    assert samples.first() == fingerprint(expected[0]) == samples.first()
    assert samples.fetch(range(30)) == expected
    assert samples.first() == fingerprint(expected[0])


class Told(IterableDataset):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return itertools.count(100 * self.epoch)


def test_a_stream_is_told_its_epoch():
    samples = StreamSamples(Told(), 5, list)
    assert samples.fetch([0, 1], epoch=2) == [200, 201]
    assert samples.fetch([0], epoch=3) == [300]


def test_a_stream_that_ends_too_early_says_how_long_it_was():
    samples = StreamSamples(range(7), 10, list)
    assert samples.fetch(range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"ended after 7 samples of epoch 1, .* epoch_samples=7"):
        samples.fetch(range(5, 10))


class Piped(Shuffling):
    """As torchdata's pipes do it."""

    def __len__(self) -> int:
        raise TypeError("no valid length")


def test_a_validation_stream_without_a_length_is_counted():
    for stream, samples in ((Piped(), 30), (Sized(), 30), (Sized(10), 10)):
        task = hk.Task(model=list, data=[1], loss=len, optimizer=list, validate=stream)
        validation = open_validation(task, seed=0)
        assert len(validation) == samples
        assert len(validation.fetch(range(samples))) == 3
    with pytest.raises(DataError, match="Piped has no length"):
        open_samples(Piped(), None)


def numbers():
    yield from range(6)


class Sized(Shuffling):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("data", "length"),
    [(Sized(), 30), ({1, 2, 3}, 3), (Sized, 30)],
    ids=["IterableDataset", "set", "class"],
)
def test_streams_are_told_by_their_kind_and_keep_their_length(data, length):
    samples = open_samples(data, None)
    assert isinstance(samples, StreamSamples)
    assert len(samples) == length


def test_a_generator_function_is_a_stream_that_can_be_read_again():
    samples = open_samples(numbers, list, stream_length=lambda stream: sum(1 for _ in stream))
    assert len(samples) == 6
    assert samples.fetch(range(6)) == samples.fetch(range(6), epoch=1) == list(range(6))
