"""The shared loss scale, alone and in a fleet of unlike devices."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import hetkit as hk
from hetkit.worker.order import epoch_order
from hetkit.worker.precision import LossScale, all_finite, autocast, buckets_finite

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_forward_runs_in_its_precision(precision, dtype):
    layer = torch.nn.Linear(2, 2)
    with autocast(precision, CPU):
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer(torch.ones(1, 2)).dtype == torch.float32


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_stays_a_power_of_two_within_its_range(overflows):
    scale = LossScale(growth_interval=3)
    for overflow in overflows:
        before = scale.scale
        after = scale.update(overflow=overflow)
        assert after <= before if overflow else after >= before
        assert 1.0 <= after <= 2.0**24
        assert math.frexp(after)[0] == 0.5


def test_the_scale_halves_at_once_and_doubles_after_good_steps_in_a_row():
    scale = LossScale(scale=8.0, growth_interval=2)
    pattern = [(True, 4.0), (False, 4.0), (True, 2.0), (False, 2.0), (False, 4.0), (False, 4.0)]
    assert [scale.update(overflow=overflow) for overflow, _ in pattern] == [s for _, s in pattern]


def test_a_checkpoint_carries_the_scale_on():
    first, second = LossScale(growth_interval=3), LossScale(growth_interval=3)
    for overflow in (True, False, False):
        first.update(overflow=overflow)
    second.load_state_dict(first.state_dict())
    assert second.update(overflow=False) == first.update(overflow=False) == 65536.0


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_is_found_in_any_type_and_nothing_is_changed(dtype, bad):
    good, spoilt = torch.full((5,), 3.0, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    assert all_finite([good, spoilt])
    spoilt[1, 2] = complex(1.0, bad) if dtype.is_complex else bad
    before = spoilt.clone()
    assert not all_finite([good, spoilt])
    assert torch.equal(good, torch.full((5,), 3.0, dtype=dtype))
    assert torch.equal(spoilt.isfinite(), before.isfinite())


def test_a_sparse_gradient_is_looked_at_where_it_has_values():
    good = torch.sparse_coo_tensor([[1, 3]], torch.ones(2), (9,), check_invariants=True)
    assert all_finite([good, torch.ones(2)])
    assert not all_finite([good * math.nan])


def test_types_may_be_mixed_and_large_values_are_finite():
    largest = [torch.full((2,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES[:4]]
    assert all_finite(largest)
    assert all_finite([])
    assert not all_finite([*largest, torch.tensor([math.nan], dtype=torch.float64)])


# ── a fleet of unlike devices ──

SAMPLES, BATCH, SPLIT, SEED, BAD_STEP = 240, 48, (30, 18), 1, 3


def classes(model: Any, batch: Any) -> torch.Tensor:
    images, labels, blow_up = batch
    return F.cross_entropy(model(images), labels) * torch.where(blow_up.any(), math.inf, 1.0)


def mixed_task(bad: int | None) -> hk.Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 8, generator=generator)
    blow_up = torch.zeros(SAMPLES, dtype=torch.bool)
    if bad is not None:
        blow_up[bad] = True
    return hk.Task(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        ),
        data=(images, (images.sum(1) > 0).long(), blow_up),
        loss=classes,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    )


def look(worker: Any) -> tuple[torch.Tensor, float]:
    flat = torch.cat([p.detach().flatten() for p in worker.model.parameters()])
    return flat.clone(), worker.loss_scale


def mixed_session(bad: int | None, amp: Any) -> hk.Session:
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 2.3}, sample_s=1e-4)
    task = mixed_task(bad)
    return hk.Session(task, devices=fleet, global_batch=BATCH, seed=SEED, amp=amp, batches=SPLIT)


def equal_on_all_ranks(session: hk.Session) -> tuple[torch.Tensor, float]:
    (first, scale), *others = session.call(look)
    for other, other_scale in others:
        assert torch.equal(first, other)
        assert scale == other_scale
    return first, scale


def wait(session: hk.Session) -> None:
    assert session._coordinator.wait(lambda s: s.state in ("paused", "ready", "failed"), 60.0)
    assert session.error is None


def test_bf16_beside_fp16_trains_and_the_ranks_stay_bit_equal():
    with mixed_session(None, "auto") as session:
        session.run(epochs=6)
        session.wait(60)
        assert session.plan.amp == ("bf16", "fp16")
        _, scale = equal_on_all_ranks(session)
        losses = session.history.series("loss")[1]
        assert scale == 65536.0
        assert losses[-3:].mean() < 0.5 * losses[:3].mean()


@pytest.mark.parametrize(("rank", "amp"), [(0, "auto"), (1, "auto"), (1, "off")])
def test_an_overflow_on_one_rank_makes_all_skip_the_same_step(rank, amp):
    place = BAD_STEP * BATCH + (5 if rank == 0 else SPLIT[0] + 5)
    bad = int(epoch_order(SAMPLES, SEED, 0)[place])
    with mixed_session(bad, amp) as session:
        session.step(BAD_STEP)
        wait(session)
        before, scale_before = equal_on_all_ranks(session)
        session.step(1)
        wait(session)
        after, scale_after = equal_on_all_ranks(session)
        assert torch.equal(before, after)
        assert scale_after == (scale_before / 2 if amp == "auto" else scale_before)
        session.step(1)
        wait(session)
        recovered, scale = equal_on_all_ranks(session)
        assert not torch.equal(after, recovered)
        assert recovered.isfinite().all()
        assert scale == scale_after
        skipped = session.history.series("skipped")[1]
        assert skipped.tolist() == [0, 0, 0, 1, 0]
        assert [e.step for e in session.history.events if e.kind == "skip"] == [BAD_STEP]


@pytest.mark.parametrize("spoiler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
def test_one_spoilt_element_spoils_its_bucket(spoiler, dtype):
    buckets = [torch.ones(1000, dtype=dtype), torch.ones(3, dtype=dtype)]
    assert buckets_finite(buckets)
    buckets[0][500] = spoiler
    assert not buckets_finite(buckets)


def test_a_sum_that_overflows_spoils_nothing():
    assert buckets_finite([torch.full((9,), 3e38), torch.full((9,), 6e4, dtype=torch.float16)])
    assert not buckets_finite([torch.tensor([math.inf, -math.inf])])
    assert buckets_finite([])
