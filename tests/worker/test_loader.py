import pytest
import torch

from hetkit.worker.data import open_samples
from hetkit.worker.loader import Loader

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Squares:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        return torch.tensor([index, index**2]), index


@pytest.mark.parametrize("data", [(X, Y), Squares()], ids=["arrays", "dataset"])
def test_worker_processes_fetch_what_the_rank_itself_would(data):
    samples = open_samples(data, None)
    schedules = [[[0, 5], [1], [2, 3, 4]], [[5, 4], [3]], [[0], [1], [2]]]
    inside, outside = Loader(samples, 0), Loader(samples, 2)
    for schedule in schedules:
        inside.start(schedule)
        outside.start(schedule)
        for _ in schedule[:-1]:  # the last is fetched ahead, and dropped by the next plan
            assert str(outside.next()) == str(inside.next())
    outside._loader._iterator._shutdown_workers()


def test_a_rank_without_samples_may_have_nothing_to_load():
    for num_workers in (0, 1):
        loader = Loader(open_samples((X, Y), None), num_workers)
        loader.start([])
        loader.start([[2]])
        assert loader.next()[1].tolist() == [2]
        if loader._loader is not None:
            loader._loader._iterator._shutdown_workers()
