"""All devices, the best subset, or the fastest alone."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.batch_split import split_batch, step_seconds
from hetkit.planning.step_time import StepTime
from hetkit.planning.verdict import Verdict, judge

FAST = StepTime(launch_s=0.0, sample_s=1e-3)
SLOW = StepTime(launch_s=0.0, sample_s=2.3e-3)


def pair(**asked: object) -> Verdict:
    return judge(["A100 #0", "V100 #1"], [FAST, SLOW], 256, micro_batches=[256, 256], **asked)  # type: ignore[arg-type]


def test_without_exchange_all_devices_are_best() -> None:
    verdict = pair()
    assert verdict.best_subset.ranks == (0, 1)
    assert verdict.even is not None
    assert verdict.fastest_alone is not None
    assert verdict.best_subset.samples_per_s / verdict.even.samples_per_s == pytest.approx(
        1.65, rel=0.01
    )
    assert verdict.fastest_alone.ranks == (0,)
    assert verdict.text.startswith("Use both devices, balanced: 1,430 samples/s, 1.64× the even")


def test_a_dear_exchange_leaves_the_fast_one_alone() -> None:
    verdict = pair(comm_s=0.1)
    assert verdict.best_subset.ranks == (0,)
    assert verdict.best_subset.step_s == pytest.approx(0.256)
    assert verdict.text.startswith("Use A100 #0 alone: 1,000 samples/s")
    assert "all devices, balanced" in verdict.text


def test_a_tie_goes_to_fewer_devices() -> None:
    both = pair()
    assert both.balanced is not None
    exchange_s = 0.256 - both.balanced.step_s
    assert pair(comm_s=exchange_s + 1e-9).best_subset.ranks == (0,)


def test_an_exchange_that_grows_with_the_ranks_leaves_some_out() -> None:
    models = [FAST] * 2 + [SLOW] * 4
    labels = [f"d{i}" for i in range(6)]
    verdict = judge(labels, models, 256, micro_batches=[256] * 6, comm_s=lambda n: 0.02 * n)
    assert 1 < len(verdict.best_subset.ranks) < 6
    assert verdict.best_subset.ranks[:2] == (0, 1)
    assert "without" in verdict.text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.floats(1e-4, 1e-2)), min_size=1, max_size=6),
    st.floats(0, 0.1),
)
def test_no_other_set_of_a_few_unlike_devices_is_faster(
    rows: list[tuple[float, float]], exchange_s: float
) -> None:
    models = [StepTime(launch_s=a, sample_s=c) for a, c in rows]
    n = len(models)
    verdict = judge(
        [str(i) for i in range(n)], models, 32, micro_batches=[32] * n, comm_s=exchange_s
    )
    times = []
    for count in range(1, n + 1):
        for ranks in itertools.combinations(range(n), count):
            chosen = [models[rank] for rank in ranks]
            split = split_batch(chosen, 32, micro_batches=[32] * count, floors=[1] * count)
            times.append(step_seconds(chosen, split, [32] * count) + exchange_s * (count > 1))
    # Devices within 5 % of each other count as one class, so it may miss by as much.
    assert min(times) <= verdict.best_subset.step_s <= 1.05 * min(times)


def test_many_unlike_devices_are_judged_quickly_by_their_order() -> None:
    models = [StepTime(launch_s=0.01, sample_s=1e-3 * 1.1**i) for i in range(40)]
    verdict = judge(
        [str(i) for i in range(40)],
        models,
        4096,
        micro_batches=[64] * 40,
        comm_s=lambda n: 0.01 * n,
    )
    used = verdict.best_subset.ranks
    assert used == tuple(range(len(used)))
    assert 1 < len(used) < 40


def test_what_the_bounds_forbid_is_missing() -> None:
    verdict = pair(caps=[200, 100])
    assert verdict.even is None
    assert verdict.fastest_alone is None
    assert verdict.best_subset.batches == (179, 77)
    assert [choice.name for choice in verdict.choices] == ["all devices, balanced", "best subset"]


def test_every_figure_says_what_it_is() -> None:
    real, emulated = pair(), pair(emulated=True)
    for shown in (real.text, str(real), real._repr_html_()):
        assert "predicted from measured step times" in shown
        assert "emulated" not in shown
    for shown in (emulated.text, str(emulated), emulated._repr_html_()):
        assert "emulated" in shown


def test_it_shows_as_a_table() -> None:
    verdict = judge(["<b>", "V100"], [FAST, SLOW], 256, micro_batches=[256, 256])
    assert len({line.index("<b>:") for line in str(verdict).splitlines()[1:4]}) == 1
    html = verdict._repr_html_()
    assert html.count("<tr>") == 5
    assert "&lt;b&gt;" in html
    assert "<b>:" not in html


def test_one_device_is_the_only_device() -> None:
    verdict = judge(["T4"], [FAST], 64, micro_batches=[64], comm_s=lambda n: 1.0)
    assert verdict.text.startswith("T4 is the only device: 1,000 samples/s")
    assert verdict.spread_floor == pytest.approx(1 / 64)


def test_nonsense_is_refused() -> None:
    with pytest.raises(PlanError, match="one value per device"):
        judge(["a"], [FAST, SLOW], 64, micro_batches=[64, 64])
    with pytest.raises(PlanError, match="at most 20"):
        judge(["a", "b"], [FAST, SLOW], 64, micro_batches=[64, 64], caps=[10, 10])


def test_a_small_gain_is_no_clear_gain() -> None:
    both = pair()
    assert both.balanced is not None
    exchange_s = 0.256 - both.balanced.step_s
    barely = pair(comm_s=exchange_s - 0.007)
    assert barely.best_subset.ranks == (0, 1)
    assert not barely.clear
    assert barely.text.startswith(
        "No clear gain: both devices, balanced and A100 #0 alone make 1,028 and 1,000 samples/s, "
        "2.7% apart; 5.0% would be clear"
    )
    assert barely.text in str(barely)
    other_side = pair(comm_s=exchange_s + 0.007)
    assert other_side.best_subset.ranks == (0,)
    assert not other_side.clear


@pytest.mark.parametrize(("error", "clear"), [(0.0, True), (0.05, True), (0.11, False)])
def test_a_gain_within_the_measured_error_is_no_clear_gain(error: float, clear: bool) -> None:
    verdict = pair(error=error)  # the gain is 30 %, three errors of 11 % are more
    assert verdict.clear is clear
    assert verdict.text.startswith("No clear gain") is not clear


def test_it_says_which_settings_it_holds_for() -> None:
    assert "; for amp off)" in pair(holds_for="amp off").text


def test_a_single_device_is_clear() -> None:
    verdict = judge(["A100 #0"], [FAST], 256, micro_batches=[256])
    assert verdict.rival is None
    assert verdict.clear
    assert verdict.text.startswith("A100 #0 is the only device: 1,000 samples/s")
