import pytest

from hetkit.records.steps import Event


def test_a_rank_s_speeds_and_share(rank_step):
    step = rank_step(
        batch=50, step_s=0.5, compute_s=0.25, wait_s=0.1, transfer_s=0.05, codec_s=0.05
    )
    assert step.samples_per_s == 100
    assert step.pace == 200
    assert step.comm_share == pytest.approx(0.4)


def test_an_idle_rank_has_no_pace(rank_step):
    assert rank_step(batch=0, compute_s=0.0).pace is None


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan")])
def test_a_step_takes_time(rank_step, step_s):
    with pytest.raises(ValueError, match="step_s must be above 0"):
        rank_step(step_s=step_s)


def test_a_step_is_as_long_as_its_longest_rank(rank_step, record):
    step = record(ranks=(rank_step(0, step_s=0.2, batch=10), rank_step(1, step_s=0.4, batch=30)))
    assert step.step_s == 0.4
    assert step.samples_per_s == 100


def test_the_share_of_a_step_is_that_of_the_rank_that_computes_longest(rank_step, record):
    fast = rank_step(0, step_s=1.0, compute_s=0.3, wait_s=0.5, transfer_s=0.1, codec_s=0.0)
    slow = rank_step(1, step_s=1.0, compute_s=0.8, wait_s=0.0, transfer_s=0.1, codec_s=0.0)
    step = record(ranks=(fast, slow))
    assert step.critical is slow
    assert step.comm_share == pytest.approx(0.1)
    assert step.compute_spread == pytest.approx(0.5 / 0.8)


def test_a_rank_without_samples_is_no_imbalance(rank_step, record):
    ranks = (rank_step(0, compute_s=0.2), rank_step(1, compute_s=0.0, batch=0))
    assert record(ranks=ranks).compute_spread == 0.0


def test_a_step_needs_a_rank(record, rank_step):
    with pytest.raises(ValueError, match="step 7 has no ranks"):
        type(record())(step=7, epoch=0, time_s=0.0, samples=0, loss=None, skipped=False, ranks=())


def test_an_event_is_of_a_known_kind():
    Event(step=1, epoch=0, time_s=0.0, kind="plan", text="rebalanced")
    with pytest.raises(ValueError, match=r"kind must be one of .*not 'party'"):
        Event(step=1, epoch=0, time_s=0.0, kind="party", text="")  # type: ignore[arg-type]
