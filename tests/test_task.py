from typing import Any

import numpy as np
import pytest

import hetkit as hk


def parts(**changes: Any) -> dict[str, Any]:
    good = {"model": list, "data": [1, 2], "loss": lambda m, b: 0, "optimizer": lambda p: None}
    return {**good, **changes}


def test_the_parts_are_kept_as_they_were_given() -> None:
    given = parts(validate=[3], metrics={"accuracy": max}, preload=["json"])
    task = hk.Task(**given)
    for name in ("model", "data", "loss", "optimizer", "validate", "metrics"):
        assert getattr(task, name) is given[name]
    assert task.preload == ("json",)
    assert (task.scheduler, task.collate, task.num_workers) == (None, None, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": None}, "model must be callable, not None of type NoneType"),
        ({"loss": 3}, "loss must be callable, not 3 of type int: give a class, a function"),
        ({"optimizer": "adam"}, "optimizer must be callable"),
        ({"scheduler": 1}, "scheduler must be callable"),
        ({"collate": 1}, "collate must be callable"),
        ({"sampler": 1}, "sampler must be a Sampler object or sampler"),
        ({"sampler": list}, "sampler must be a Sampler object or sampler"),
        ({"data": None}, "data is None: give a dataset"),
        ({"metrics": {"a": max}}, r"metrics \['a'\] need data to be measured on: give validate="),
        ({"metrics": {"a": 1}, "validate": [1]}, r"metrics\['a'\] must be callable"),
        ({"metrics": [max], "validate": [1]}, "metrics must map names to callables"),
        ({"preload": "json"}, r"preload must be a list of module names, .*: 'json'"),
        ({"preload": [1]}, "preload must be a list of module names"),
        ({"preload": None}, "preload must be a list of module names"),
    ],
)
def test_a_part_that_cannot_be_trained_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.TaskError, match=said):
        hk.Task(**parts(**wrong))


@pytest.mark.parametrize("name", ["num_workers", "epoch_samples"])
@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_counts_are_ints(name: str, wrong: Any) -> None:
    with pytest.raises(hk.SettingsError, match=f"{name} must be an int of at least"):
        hk.Task(**parts(**{name: wrong}))


def test_a_reduction_is_a_mean_or_a_sum() -> None:
    with pytest.raises(hk.SettingsError, match='reduction must be "mean" or "sum", not None'):
        hk.Task(**parts(reduction=None))


def test_an_epoch_has_a_sample() -> None:
    with pytest.raises(hk.SettingsError, match="epoch_samples must be an int of at least 1, not 0"):
        hk.Task(**parts(epoch_samples=0))


@pytest.mark.parametrize("name", ["pin_memory", "seed_samples"])
def test_switches_are_true_or_false(name: str) -> None:
    with pytest.raises(hk.SettingsError, match=f"{name} must be True or False, not 'yes'"):
        hk.Task(**parts(**{name: "yes"}))


class IterableDataset:
    """Known by its name: a task is described without torch."""

    def __getitem__(self, index: int) -> None:
        raise NotImplementedError


def test_a_stream_is_not_asked_for_a_length_that_it_may_not_have() -> None:
    class Piped(IterableDataset):
        def __len__(self) -> int:
            raise TypeError("no valid length")

    hk.Task(**parts(data=Piped(), validate=Piped())).check_data()


def test_a_streams_order_is_its_own() -> None:
    assert hk.Task(**parts(data=IterableDataset())).sampler is None
    with pytest.raises(hk.TaskError, match="leave sampler out, or shuffle in the stream"):
        hk.Task(**parts(data=IterableDataset(), sampler=[0]))
    with pytest.raises(hk.TaskError, match="leave sampler out"):
        hk.Task(**parts(data={1, 2}, sampler=[0]))


def test_a_missing_part_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="loss"):
        hk.Task(model=list, data=[1], optimizer=list)  # type: ignore[call-arg]


def test_a_task_equals_itself_and_no_other_whatever_its_data() -> None:
    data = np.zeros(3)
    task, same_parts = (hk.Task(**parts(data=data)) for _ in range(2))
    assert task == task
    assert task != same_parts
    assert len({task, same_parts}) == 2


def test_its_text_does_not_hold_the_data() -> None:
    assert len(repr(hk.Task(**parts(data=list(range(100_000)), validate="x" * 100_000)))) < 1000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"parameters": [1]}, "parameters must be callable"),
        ({"scheduler_per": "batch"}, 'scheduler_per must be "epoch" or "step", not \'batch\''),
        ({"ema": 1.0}, "ema must be None or a decay from 0 to below 1, such as 0.999, not 1.0"),
        ({"ema": True}, "ema must be None or a decay"),
    ],
)
def test_groups_schedule_and_average_are_checked(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.HetkitError, match=said):
        hk.Task(**parts(**wrong))
