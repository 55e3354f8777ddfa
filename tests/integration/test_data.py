"""Every kind of data, order and augmentation trains as one process does, whatever the split."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler

import hetkit as hk
from hetkit.worker.data import open_training
from hetkit.worker.order import EpochOrder

SEED = 5
SAMPLES = 41
GLOBAL_BATCH = 12  # the last of an epoch's four steps has 5 samples
LIMIT_S = 60.0


def features(index: int) -> torch.Tensor:
    return torch.sin(torch.arange(1.0, 5.0, dtype=torch.float64) * (index + 1))


class Augmented(Dataset):
    """A crop-like choice, a flip and noise, each from another of the global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = features(index).roll(random.randrange(4))
        if np.random.rand() < 0.5:
            x = x.flip(0)
        x = x + 0.1 * torch.randn(4, dtype=torch.float64)
        return x, features(index).sum()


class Stream(IterableDataset):
    """A log of samples with a shuffle buffer and noise."""

    def __iter__(self) -> Any:
        buffer: list[int] = []
        for index in range(1000):
            buffer.append(index % SAMPLES)
            if len(buffer) == 8:
                index = buffer.pop(random.randrange(8))
                x = features(index) + 0.1 * torch.randn(4, dtype=torch.float64)
                yield x, features(index).sum()


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    ).double()


def loss(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square().mean()


def make_task(**parts: Any) -> hk.Task:
    usual = {
        "model": make_model,
        "data": Augmented(),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    }
    return hk.Task(**{**usual, **parts})


def plain(task: hk.Task, epochs: int, global_batch: int = GLOBAL_BATCH) -> list[float]:
    """The losses of one plain process that takes each step's samples as one batch."""
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    samples = open_training(task, SEED)
    order = EpochOrder(samples, task.sampler, seed=SEED, epoch_samples=task.epoch_samples)
    losses = []
    for epoch in range(epochs):
        for start in range(0, order.take(epoch), global_batch):
            piece = slice(start, start + global_batch)
            repeats = None if order.repeats is None else order.repeats[piece]
            batch = samples.fetch(order.indices[piece].tolist(), epoch=epoch, repeats=repeats)
            returned = task.loss(model, batch)
            mean = returned[0] if isinstance(returned, tuple) else returned
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            losses.append(float(mean.detach()))
    return losses


def curve(session: hk.Session) -> list[float]:
    return [float(value) for value in session.history.series("loss")[1]]


def trained(task: hk.Task, epochs: int = 2, **arguments: Any) -> list[float]:
    usual = {"devices": "cpu*2", "global_batch": GLOBAL_BATCH, "seed": SEED}
    with hk.Session(task, **{**usual, **arguments}) as session:
        session.run(epochs)
        session.wait(LIMIT_S)
        return curve(session)


def error_of(task: hk.Task, epochs: int = 1, **arguments: Any) -> Exception:
    with pytest.raises(hk.DataError) as caught:
        trained(task, epochs, **arguments)
    return caught.value


def same(got: list[float], expected: list[float]) -> bool:
    return got == pytest.approx(expected, rel=1e-10)


SPLITS = (
    {"devices": "cpu"},
    {"devices": "inline", "micro_batch": 5},
    {"batches": [9, 3], "micro_batch": 4},
    {"devices": "cpu*3", "batches": [0, 7, 5]},
)


# ── augmentation ──


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_augmentation_is_that_of_one_process(num_workers: int) -> None:
    expected = plain(make_task(), 2)
    assert len(set(expected)) == len(expected)
    for split in SPLITS if num_workers == 0 else SPLITS[2:3]:
        got = trained(make_task(num_workers=num_workers, pin_memory=True), **split)
        assert same(got, expected), split


def test_augmentation_differs_between_epochs() -> None:
    class Noise(Augmented):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(4, dtype=torch.float64), torch.randn((), dtype=torch.float64)

    def untrained(model: Any, batch: Any) -> torch.Tensor:
        return 0 * model(batch[0]).sum() + batch[1].sum()

    task = make_task(data=Noise(), loss=untrained)
    with hk.Session(task, devices="cpu*2", global_batch=SAMPLES, seed=SEED) as session:
        session.run(3)
        session.wait(LIMIT_S)
        assert len(set(curve(session))) == 3


def test_turned_off_augmentation_is_not_that_of_one_process() -> None:
    task = make_task(seed_samples=False)
    one, two, again = (
        trained(task, 1, **split) for split in ({"devices": "cpu"}, SPLITS[2], SPLITS[2])
    )
    assert not same(two, one)
    assert two == again, "it is reproducible for the same plan"


# ── samplers ──


def weighted() -> WeightedRandomSampler:
    """Draws the same few samples again and again, more of them than there are samples."""
    return WeightedRandomSampler([1.0] * 5 + [0.1] * (SAMPLES - 5), 50)


def drawn_by_weight(dataset: Any, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(torch.arange(1.0, len(dataset)), 30, generator=generator)


@pytest.mark.parametrize(
    ("sampler", "steps"), [(weighted(), 5), (drawn_by_weight, 3), (range(7, 30), 2)]
)
def test_a_samplers_order_is_the_same_for_every_split(sampler: Any, steps: int) -> None:
    task = make_task(sampler=sampler)
    expected = plain(task, 2)
    assert len(expected) == 2 * steps
    for split in SPLITS:
        assert same(trained(task, **split), expected), split


class Noted(Augmented):
    """Notes in a file of its process which samples it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def unreproducible(dataset: Any, generator: torch.Generator) -> list[int]:
    order = list(range(len(dataset)))
    random.Random(os.urandom(8)).shuffle(order)
    return order


def test_even_an_unreproducible_sampler_keeps_the_ranks_together(tmp_path: Path) -> None:
    task = make_task(data=Noted(tmp_path), sampler=unreproducible)
    trained(task, 1, devices="cpu*3", batches=[7, 4, 1])
    noted = [[int(line) for line in path.read_text().split()] for path in tmp_path.glob("[0-9]*")]
    assert len(noted) == 3
    assert all(each[:2] == [0, 1] for each in noted), "the probe's"
    assert sorted(index for each in noted for index in each[2:]) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("sampler", "epoch_samples", "said"),
    [
        ([SAMPLES], None, f"drew index {SAMPLES}, and the data has {SAMPLES} samples"),
        (lambda dataset, generator: [], None, "drew no index"),
        (range(5), 6, "drew 5 indices, and epoch_samples is 6"),
        (None, 6, "epoch_samples is for a stream or a sampler"),
    ],
)
def test_a_sampler_that_cannot_be_followed_says_why(
    sampler: Any, epoch_samples: int | None, said: str
) -> None:
    failed = error_of(make_task(sampler=sampler, epoch_samples=epoch_samples))
    assert said in str(failed)


def test_an_epoch_of_another_length_is_refused_with_the_remedy() -> None:
    def growing(dataset: Any, generator: torch.Generator) -> range:
        return range(20 + generator.initial_seed() % 7)

    failed = error_of(make_task(sampler=growing), epochs=5)
    assert "all epochs must have as many. epoch_samples=" in str(failed)


# ── streams ──


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_read_as_by_one_process(num_workers: int) -> None:
    expected = plain(make_task(data=Stream(), epoch_samples=SAMPLES), 2)
    task = make_task(data=Stream, epoch_samples=SAMPLES, num_workers=num_workers)
    for split in SPLITS if num_workers == 0 else SPLITS[2:3]:
        assert same(trained(task, **split), expected), split


def test_a_stream_that_is_sharded_by_rank_is_found_out() -> None:
    def sharded() -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else os.getpid()
        return ((features(index), features(rank).sum()) for index in range(SAMPLES))

    failed = error_of(make_task(data=sharded, epoch_samples=SAMPLES))
    assert "does not begin with the same sample on all ranks" in str(failed)


def test_a_stream_may_validate_too() -> None:
    def triples() -> Any:
        return ((features(index), features(index).sum()) for index in range(17))

    task = make_task(validate=triples)
    figures = []
    for split in SPLITS:
        arguments = {"devices": "cpu*2", "global_batch": GLOBAL_BATCH, "seed": SEED, **split}
        with hk.Session(task, **arguments) as session:
            session.run(1)
            session.wait(LIMIT_S)
            figures.append(session.ledger[0].metrics["loss"])
    assert figures == pytest.approx([figures[0]] * len(figures), rel=1e-10)


def test_a_stream_that_ends_early_or_has_no_length_says_so() -> None:
    short = error_of(make_task(data=Stream(), epoch_samples=2000), global_batch=500)
    assert "the stream ended after 993 samples of epoch 1" in str(short)
    assert "epoch_samples=…" in str(error_of(make_task(data=Stream())))
    several = make_task(data=Stream(), epoch_samples=9, num_workers=2)
    assert "num_workers is 2: give 1" in str(error_of(several, global_batch=9))


# ── sizes ──


def test_a_global_batch_larger_than_the_data_and_a_last_step_smaller_than_the_ranks() -> None:
    for samples, global_batch in ((7, 16), (17, 16), (1, 16)):
        task = make_task(sampler=range(samples))
        expected = plain(task, 2, global_batch)
        for split in ({"devices": "cpu*3", "batches": [9, 4, 3]}, {"batches": [1.0, 5.0]}):
            got = trained(task, global_batch=global_batch, **split)
            assert same(got, expected), (samples, split)


class Sentences(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([features(index + step) for step in range(1 + index * index % 13)])


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.GRU(4, 3)
        self.head = torch.nn.Linear(3, 4)

    def forward(self, sentences: Any) -> torch.Tensor:
        return self.head(self.rnn(sentences)[0].data)


def packed(sentences: list[torch.Tensor]) -> dict[str, Any]:
    return {"sentences": pack_sequence(sentences, enforce_sorted=False)}


def per_word(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    words = batch["sentences"].data
    return (model(batch["sentences"]) - words.square()).square().mean(), len(words)


def test_sentences_of_unequal_lengths_weigh_by_their_words() -> None:
    task = make_task(
        model=lambda: Reader().double(), data=Sentences(), collate=packed, loss=per_word
    )
    expected = plain(task, 2)
    for split in SPLITS:
        assert same(trained(task, **split), expected), split


# ── what depends on the split ──


def test_dropout_is_reproducible_for_the_same_plan_and_not_invariant() -> None:
    task = make_task(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        ).double()
    )
    split = {"batches": [9, 3], "micro_batch": 4}
    assert trained(task, **split) == trained(task, **split)
    assert not same(trained(task, **split), trained(task, batches=[3, 9], micro_batch=4))


# ── stopping in the middle of an epoch ──

KINDS = {
    "augmented": {},
    "sampler": {"sampler": weighted()},
    "stream": {"data": Stream, "epoch_samples": SAMPLES},
    "processes": {"num_workers": 2},
    "stream in a process": {"data": Stream, "epoch_samples": SAMPLES, "num_workers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_changed_in_mid_epoch_goes_on_with_the_same_samples(kind: str, reach: Any) -> None:
    task = make_task(**KINDS[kind])
    expected = plain(task, 2)
    with hk.Session(
        task, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED, batches=[9, 3]
    ) as session:
        for batches, micro_batch in (([3, 9], 2), ([0, 12], 5), ([6, 6], None)):
            session.step(1)
            reach(session, "paused")
            session.set(batches=batches, micro_batch=micro_batch)
        session.resume()
        session.wait(LIMIT_S)
        session.run(1)
        session.wait(LIMIT_S)
        assert same(curve(session), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_mid_epoch_goes_on_with_the_same_samples(
    kind: str, tmp_path: Path, reach: Any
) -> None:
    task = make_task(**KINDS[kind])
    expected = plain(task, 2)
    with hk.Session(
        task, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED, batches=[9, 3]
    ) as session:
        session.step(2)
        reach(session, "paused")
        seen = curve(session)
        path = session.save(tmp_path / "middle.ckpt")
    with hk.Session.load(path, task, devices="cpu*3", batches="even", micro_batch=3) as session:
        session.run(2)
        session.wait(LIMIT_S)
        seen += curve(session)
    assert same(seen, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_death_in_mid_epoch_the_same_samples_are_trained_on(kind: str) -> None:
    task = make_task(**KINDS[kind])
    expected = plain(task, 2)
    fleet = hk.emulate("2xV100", sample_s=1e-5, dies_at={"V100 #1": len(expected) // 2 + 2})
    with hk.Session(
        task, devices=fleet, global_batch=GLOBAL_BATCH, seed=SEED, batches=[9, 3]
    ) as session:
        session.run(2)
        session.wait(LIMIT_S)
        assert any(event.kind == "failure" for event in session.history.events)
        assert same(curve(session)[-len(expected) :], expected)
