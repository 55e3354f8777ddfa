import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.plan import Plan

GOOD: dict[str, Any] = {
    "version": 1,
    "epoch": 2,
    "first_step": 23,
    "epoch_first_step": 20,
    "epoch_steps": 10,
    "global_batch": 64,
    "batches": (48, 16),
    "micro_batches": (48, 16),
    "amp": ("off", "bf16"),
    "compression": "none",
}


@given(
    batches=st.lists(st.integers(0, 1000), min_size=1, max_size=9).map(tuple),
    epoch_first_step=st.integers(0, 10**9),
    epoch_steps=st.integers(1, 10**6),
    data=st.data(),
)
def test_a_plan_knows_its_ranks_and_its_last_step(
    batches: tuple[int, ...], epoch_first_step: int, epoch_steps: int, data: st.DataObject
) -> None:
    plan = Plan(
        **GOOD
        | {
            "batches": batches,
            "global_batch": sum(batches),
            "micro_batches": tuple(max(1, b) for b in batches),
            "amp": ("off",) * len(batches),
            "epoch_first_step": epoch_first_step,
            "epoch_steps": epoch_steps,
            "first_step": epoch_first_step + data.draw(st.integers(0, epoch_steps - 1)),
        }
    )
    assert plan.world_size == len(batches)
    assert plan.first_step <= plan.last_step == epoch_first_step + epoch_steps - 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sync_every": 0}, "sync_every must be at least 1"),
        ({"batches": ()}, "one number of at least 0 per rank"),
        ({"batches": (65, -1)}, "one number of at least 0 per rank"),
        ({"batches": (48, 15)}, r"batches \(48, 15\) do not sum to 64"),
        ({"micro_batches": (48,)}, "one value per rank"),
        ({"amp": ("off",)}, "one value per rank"),
        ({"micro_batches": (48, 0)}, "micro_batches must be at least 1"),
        ({"first_step": 19}, "step 19 is not one of the epoch's 10 steps from 20"),
        ({"first_step": 30}, "step 30 is not one of the epoch's 10 steps from 20"),
        ({"epoch_steps": 0, "first_step": 20}, "not one of the epoch's 0 steps"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.PlanError, match=said):
        Plan(**GOOD | wrong)


def test_a_plan_is_frozen_and_compares_by_value() -> None:
    assert Plan(**GOOD) == Plan(**GOOD)
    assert dataclasses.replace(Plan(**GOOD), version=2) != Plan(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan(**GOOD).version = 3  # type: ignore[misc]


@given(
    every=st.integers(1, 9),
    first=st.integers(0, 100),
    steps=st.integers(1, 30),
    place=st.integers(0, 29),
)
def test_the_ranks_stand_alike_every_so_many_steps_and_at_the_end(
    every: int, first: int, steps: int, place: int
) -> None:
    step = first + place % steps
    epoch = {"epoch_first_step": first, "epoch_steps": steps, "first_step": first}
    plan = Plan(**GOOD | epoch | {"sync_every": every})
    syncs = [first + n for n in range(steps) if (n + 1) % every == 0 or n == steps - 1]
    assert plan.next_sync(step) == min(sync for sync in syncs if sync >= step)
    assert plan.local == (every > 1)
