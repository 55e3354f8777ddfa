"""The balancer, in a simulated training: it converges, keeps still, and follows a change."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetkit.errors import PlanError
from hetkit.planning.balancer import BalancerState, Decision, Window, decide, observe
from hetkit.planning.batch_split import even_split, split_batch, step_seconds
from hetkit.planning.step_time import Observation, StepTime

WINDOW_STEPS = 5
DROPPED_STEPS = 2


@dataclass
class Training:
    """Plays the coordinator: steps, windows, and the plan that the balancer makes of them."""

    compute_s: Callable[[int, int, int], float]  # (rank, batch, step) → seconds
    batches: tuple[int, ...]
    micro_batches: tuple[int, ...]
    noise: float = 0.0
    seed: int = 0
    caps: tuple[int, ...] | None = None
    comm_s: float = 0.0
    step: int = 0
    state: BalancerState = field(default_factory=BalancerState)
    replans: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def run(self, until: int) -> "Training":
        rng = random.Random(self.seed + self.step)
        window: list[list[Observation]] = [[] for _ in self.batches]
        dropped = DROPPED_STEPS if not self.step else 0
        while self.step < until:
            self.step += 1
            for rank, batch in enumerate(self.batches):
                seen = Observation(
                    batch=batch,
                    micro_steps=-(-batch // self.micro_batches[rank]),
                    compute_s=self.compute_s(rank, batch, self.step)
                    * (1 + self.noise * rng.gauss(0, 1)),
                )
                if not dropped:
                    window[rank].append(seen)
            dropped = max(0, dropped - 1)
            if len(window[0]) == WINDOW_STEPS:
                dropped = DROPPED_STEPS if self.decide(window) else 0
                window = [[] for _ in self.batches]
        return self

    def decide(self, window: Sequence[Sequence[Observation]]) -> bool:
        self.state, decision = decide(
            self.state,
            Window(
                batches=self.batches,
                micro_batches=self.micro_batches,
                observations=tuple(tuple(seen) for seen in window),
                caps=self.caps,
                comm_s=self.comm_s,
            ),
        )
        self.decisions.append(decision)
        if decision.batches is not None:
            self.batches = decision.batches
            self.replans.append((self.step, decision.batches))
        return decision.batches is not None


def train(
    models: Sequence[StepTime],
    total: int,
    *,
    batches: tuple[int, ...] | None = None,
    micro_batches: tuple[int, ...] | None = None,
    noise: float = 0.0,
    seed: int = 0,
    comm_s: float = 0.0,
) -> Training:
    micro = micro_batches or (total,) * len(models)
    return Training(
        compute_s=lambda rank, batch, step: models[rank].seconds(batch, micro[rank]),
        batches=batches or even_split(total, len(models)),
        micro_batches=micro,
        noise=noise,
        seed=seed,
        comm_s=comm_s,
    )


def quality(models: Sequence[StepTime], training: Training) -> float:
    """The best step time over the present one."""
    micro = training.micro_batches
    best = split_batch(models, sum(training.batches), micro_batches=micro, floors=[1] * len(models))
    return step_seconds(models, best, micro) / step_seconds(models, training.batches, micro)


PAIR = [StepTime(launch_s=0.0, sample_s=1e-3), StepTime(launch_s=0.0, sample_s=2.3e-3)]
SIX = [StepTime(launch_s=0.02, sample_s=2.3e-3)] * 4 + [StepTime(launch_s=0.02, sample_s=1e-3)] * 2


@pytest.mark.parametrize(("models", "replans"), [(PAIR, 1), (SIX, 2)], ids=["1:2.3", "4x1+2x2.3"])
def test_the_best_split_is_reached_within_twenty_steps(
    models: list[StepTime], replans: int
) -> None:
    training = train(models, 256).run(20)
    assert len(training.replans) == replans
    assert quality(models, training) == 1.0
    training.run(200)
    assert len(training.replans) == replans


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("models", [PAIR, SIX], ids=["1:2.3", "4x1+2x2.3"])
def test_it_converges_under_two_percent_noise(models: list[StepTime], seed: int) -> None:
    training = train(models, 256, noise=0.02, seed=seed).run(20)
    assert len(training.replans) <= 2
    assert quality(models, training) >= 0.96
    training.run(100)
    assert quality(models, training) >= 0.97


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("n", [2, 6, 16])
def test_noise_alone_never_triggers(n: int, seed: int) -> None:
    models = [StepTime(launch_s=0.01, sample_s=1e-3)] * n
    assert not train(models, 64 * n, noise=0.02, seed=seed).run(200).replans


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_trigger_at_the_best_split_of_unlike_devices(seed: int) -> None:
    training = train(SIX, 256, noise=0.02, seed=seed).run(100)
    best = split_batch(SIX, 256, micro_batches=training.micro_batches)
    training.batches, training.replans = best, []
    training.run(300)
    assert quality(SIX, training) >= 0.97
    assert len(training.replans) <= 1


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("at", range(101, 106))
def test_a_card_that_slows_down_is_rebalanced_within_two_windows(at: int, noise: float) -> None:
    training = train(SIX, 256, noise=noise)
    healthy = training.compute_s
    training.compute_s = lambda rank, batch, step: (
        healthy(rank, batch, step) * (1.5 if rank == 5 and step >= at else 1.0)
    )
    training.run(at + 3 * WINDOW_STEPS)  # a window may have begun before the change
    hot = [*SIX[:5], StepTime(launch_s=0.03, sample_s=1.5e-3)]
    assert [step for step, _ in training.replans if step >= at]
    assert quality(hot, training) >= 0.95
    training.run(at + 100)
    assert quality(hot, training) >= 0.97
    assert len([step for step, _ in training.replans if step >= at]) <= 3


def test_accumulated_micro_batches_are_balanced_too() -> None:
    training = train(SIX, 512, micro_batches=(16,) * 4 + (64,) * 2).run(20)
    assert quality(SIX, training) >= 0.97


def test_a_cap_is_kept() -> None:
    training = train(PAIR, 256)
    training.caps = (140, 256)
    assert training.run(20).batches == (140, 116)


def test_a_dear_exchange_makes_small_gains_too_small() -> None:
    models = [StepTime(launch_s=0.0, sample_s=1e-3), StepTime(launch_s=0.0, sample_s=1.1e-3)]
    assert train(models, 256).run(20).replans
    assert not train(models, 256, comm_s=1.0).run(100).replans


def test_a_staircase_device_does_not_make_the_plan_swing() -> None:
    def compute_s(rank: int, batch: int, step: int) -> float:
        return math.ceil(batch / 32) * 32e-3 if rank == 0 else batch * 2.3e-3

    for seed in range(5):
        training = Training(
            compute_s=compute_s,
            batches=(128, 128),
            micro_batches=(256, 256),
            noise=0.01,
            seed=seed,
        ).run(1000)
        assert len(training.replans) <= 6


def steady(
    state: BalancerState, times: tuple[float, float], comm_s: float = 0.0
) -> tuple[BalancerState, Decision]:
    """One window of two ranks with 10 samples each that take the given seconds."""
    observations = tuple(
        (Observation(batch=10, micro_steps=1, compute_s=time),) * WINDOW_STEPS for time in times
    )
    window = Window(
        batches=(10, 10), micro_batches=(20, 20), observations=observations, comm_s=comm_s
    )
    return decide(state, window)


@pytest.mark.parametrize(
    ("now_s", "patience", "cool_down"), [(0.99, 4, 3), (0.91, 4, 3), (0.89, 2, 1), (0.8, 2, 1)]
)
def test_a_promise_half_broken_lengthens_the_cool_down(
    now_s: float, patience: int, cool_down: int
) -> None:
    state = BalancerState(windows=9, replans=3, cool_down=2, promised=(1.0, 0.8))
    state, _ = steady(state, (now_s, now_s), comm_s=5.0)
    assert (state.patience, state.cool_down, state.promised) == (patience, cool_down, None)


def test_the_cool_down_grows_no_longer_than_its_bound_and_shrinks_back() -> None:
    state = BalancerState(windows=9, replans=3, patience=16, promised=(1.0, 0.8))
    broken, _ = steady(state, (1.0, 1.0))
    kept, _ = steady(state, (0.8, 0.8))
    assert (broken.patience, kept.patience) == (16, 2)


def test_after_the_warm_up_two_windows_must_agree_and_none_be_cooling_down() -> None:
    state = BalancerState(windows=9, replans=2, cool_down=2)
    taken = []
    for _ in range(3):
        state, decision = steady(state, (1.0, 3.0))
        taken.append(decision.batches)
    assert taken == [None, None, (15, 5)]
    assert (state.agreeing, state.cool_down, state.promised) == (0, 2, (3.0, 1.5))
    state, _ = steady(BalancerState(windows=9, replans=2), (1.0, 3.0))
    state, decision = steady(state, (1.0, 1.0))
    assert state.agreeing == 0
    assert decision.batches is None


def test_gains_are_of_the_whole_step() -> None:
    decision = train(PAIR, 256, comm_s=0.1).run(7).decisions[0]
    assert decision.batches == (179, 77)
    assert decision.now_s == pytest.approx(128 * 2.3e-3 + 0.1)
    assert decision.new_s == pytest.approx(179e-3 + 0.1)
    assert decision.predicted_gain == pytest.approx(1 - (0.179 + 0.1) / (128 * 2.3e-3 + 0.1))
    assert "first measurements: 1.41× as fast" in decision.reason


def test_the_warm_up_ends_with_the_first_window_that_stays() -> None:
    assert BalancerState().warming_up
    assert train(SIX, 256).run(7).state.warming_up
    assert not train(SIX, 256).run(14).state.warming_up
    assert not train([SIX[0]] * 2, 256).run(7).state.warming_up


def test_too_few_steps_decide_nothing() -> None:
    seen = Observation(batch=8, micro_steps=1, compute_s=1.0)
    window = Window(batches=(8, 8), micro_batches=(8, 8), observations=((seen,) * 5, (seen,) * 2))
    state, decision = decide(BalancerState(), window)
    assert decision.batches is None
    assert decision.predicted_gain is None
    assert "rank 1" in decision.reason
    state, decision = decide(state, window)
    assert decision.predicted_gain == 0.0


def test_a_rank_that_never_had_work_is_named() -> None:
    seen = Observation(batch=8, micro_steps=1, compute_s=1.0)
    window = Window(batches=(8, 0), micro_batches=(8, 8), observations=((seen,) * 5, ()))
    state, decision = decide(BalancerState(), window)
    assert "rank 1" in decision.reason
    assert state.models()[1] is None


def test_observing_decides_nothing_but_learns() -> None:
    seen = Observation(batch=8, micro_steps=1, compute_s=1.0)
    window = Window(batches=(8,), micro_batches=(8,), observations=((seen,) * 5,))
    state = observe(BalancerState(), window)
    assert state.windows == 0
    assert state.models() == (StepTime(launch_s=0.0, sample_s=0.125),)


def test_survivors_keep_their_paces() -> None:
    state = train(SIX, 256).run(20).state.keep([0, 4, 5])
    assert len(state.models()) == 3
    assert state.windows == state.replans == 0
    model = state.models()[1]
    assert model is not None
    assert model.sample_s == pytest.approx(1e-3)


def test_windows_that_do_not_fit_are_refused() -> None:
    seen = Observation(batch=8, micro_steps=1, compute_s=1.0)
    with pytest.raises(PlanError, match="one value per rank"):
        Window(batches=(8, 8), micro_batches=(8,), observations=((seen,), (seen,)))
    with pytest.raises(PlanError, match="comm_s"):
        Window(batches=(8,), micro_batches=(8,), observations=((seen,),), comm_s=-1.0)
    state = train(SIX, 256).run(7).state
    with pytest.raises(PlanError, match=r"6 ranks and was given 1.*keep"):
        decide(state, Window(batches=(8,), micro_batches=(8,), observations=((seen,) * 5,)))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    n=st.integers(2, 8),
    launch_s=st.floats(0.0, 0.05),
    share=st.integers(8, 128),
    seed=st.integers(0, 10**6),
)
def test_two_percent_of_jitter_never_triggers(
    n: int, launch_s: float, share: int, seed: int
) -> None:
    models = [StepTime(launch_s=launch_s, sample_s=1e-3)] * n
    assert not train(models, share * n, noise=0.02, seed=seed).run(250).replans


unlike = st.lists(st.tuples(st.floats(0.0, 0.02), st.floats(5e-4, 5e-3)), min_size=2, max_size=6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(rows=unlike, seed=st.integers(0, 10**6))
def test_after_the_warm_up_no_replan_makes_the_step_longer(
    rows: list[tuple[float, float]], seed: int
) -> None:
    models = [StepTime(launch_s=a, sample_s=c) for a, c in rows]
    training = train(models, 64 * len(models), noise=0.02, seed=seed).run(20)
    before = quality(models, training)
    training.replans = []
    training.run(200)
    assert len(training.replans) <= 2
    assert quality(models, training) >= before - 0.01


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rows=unlike,
    at=st.integers(60, 200),
    factor=st.floats(1.3, 4.0),
    seed=st.integers(0, 10**6),
)
def test_a_card_that_heats_up_is_followed_within_two_windows_of_it(
    rows: list[tuple[float, float]], at: int, factor: float, seed: int
) -> None:
    models = [StepTime(launch_s=a, sample_s=c) for a, c in rows]
    training = train(models, 64 * len(models), noise=0.02, seed=seed)
    healthy = training.compute_s
    training.compute_s = lambda rank, batch, step: (
        healthy(rank, batch, step) * (factor if rank == 0 and step >= at else 1.0)
    )
    training.run(at - 1)
    hot = [StepTime(launch_s=factor * rows[0][0], sample_s=factor * rows[0][1]), *models[1:]]
    worth = 1 - quality(hot, training)
    training.replans = []
    # A window may have begun before, and a re-plan of shortly before be cooling down.
    training.run(at + 5 * WINDOW_STEPS)
    if worth > 0.08:  # three standard errors of a window under 2 % of noise, and some
        assert training.replans
        assert 1 - quality(hot, training) <= worth / 2
        assert quality(hot, training.run(at + 100)) >= 0.93


def test_the_second_window_corrects_the_first_by_less_than_the_dead_band() -> None:
    state = BalancerState(windows=1, replans=1)
    _, decision = steady(state, (1.0, 1.03))  # 10 + 10 samples cannot follow 3 %
    assert decision.outcome == "balanced"
    observations = tuple(
        (Observation(batch=100, micro_steps=1, compute_s=time),) * WINDOW_STEPS
        for time in (1.0, 1.03)
    )
    window = Window(batches=(100, 100), micro_batches=(200, 200), observations=observations)
    _, decision = decide(state, window)
    assert (decision.outcome, decision.batches) == ("replan", (101, 99))
    _, decision = decide(replace(state, windows=9), window)
    assert decision.outcome == "balanced"
