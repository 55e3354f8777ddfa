r"""When to split the batch anew, and how: the decision maker behind ``batches="auto"``.

A pure function: the coordinator keeps a frozen `BalancerState` and, every few steps, gives it the
window of observations since the last decision::

    steps   1 2 │ 3 4 5 6 7 │ 8 9 │ 10 … 14 │ 15 … 19 │ 20 … 24 │ …
            drop   window     drop   window    window    window
                         ↑ at once       ↑ at once    └─────────┴ what two windows agree on

With T the whole step (the slowest rank's compute plus the exchange), a new split gains
g = 1 − T(new)/T(now). It is made when

    g > max(2 %, 3·σ_T/T),

where σ_T is the standard error of the T that g is computed from: of the median of all steps
measured at the present size, times the rank's share of the step, at the worst rank. So noise does
not trigger, and a small gain is harvested once enough steps have been seen to be sure of it.

The first window, when only one size is known and time counts as proportional to samples, acts at
once; so does the one after it, the first that can tell the fixed cost from the cost per sample: it
corrects the first, and takes 0.5 % for enough where the noise allows.
From then on two windows running must agree, and each re-plan is followed by two windows of
cool-down. When a re-plan turns out to bring less than half of its promise, that cool-down is twice
as long as the last, so that a device that does not follow the model cannot make the plan swing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hetkit.errors import PlanError
from hetkit.planning.batch_split import split_batch, step_seconds
from hetkit.planning.pace import LEAST_TIMES, Pace, SizeTimes
from hetkit.planning.step_time import ComputeTime, Observation

Outcome = Literal["measuring", "balanced", "waiting", "replan"]
"""What a decision comes to: too little is known yet; no split is better by enough; one is, and has
to prove it or to wait; a new split."""

_LEAST_GAIN = 0.02
_LEAST_CORRECTION = 0.005
_SIGMAS = 3.0
_COOL_DOWN = 2
_LONGEST_COOL_DOWN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What was observed since the last decision, and what the next split must keep to.

    Args:
        batches: Samples per rank in a full step now; their sum is the global batch.
        micro_batches: Largest micro-batch of each rank.
        observations: Per rank, its compute times since the last decision, without the first two
            steps after a re-plan. Steps of another size (an epoch's smaller last one) may be
            among them: they teach the model a second size.
        floors: Least samples of each rank. Default: 1 each, so that every device stays in use.
        caps: Most samples of each rank. Default: no bound.
        granularity: New batches are multiples of so many samples. Default 1.
        comm_s: Seconds of exchange that every step pays on top, whatever the split. Default 0.

    Raises:
        PlanError: The lists differ in length, or a value is out of its range.

    Example:
        >>> seen = Observation(batch=50, micro_steps=1, compute_s=0.5)
        >>> window = Window(batches=(50,), micro_batches=(64,), observations=((seen,) * 5,))
        >>> window.comm_s
        0.0
    """

    batches: tuple[int, ...]
    micro_batches: tuple[int, ...]
    observations: tuple[tuple[Observation, ...], ...]
    floors: tuple[int, ...] | None = None
    caps: tuple[int, ...] | None = None
    granularity: int = 1
    comm_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < len(self.batches) == len(self.micro_batches) == len(self.observations):
            raise PlanError(
                f"a window needs one value per rank: {len(self.batches)} batches, "
                f"{len(self.micro_batches)} micro_batches, {len(self.observations)} observations."
            )
        if min(self.batches) < 0 or min(self.micro_batches) < 1 or not 0 <= self.comm_s < math.inf:
            raise PlanError(
                "batches must be ≥ 0, micro_batches ≥ 1, comm_s finite and ≥ 0: "
                f"{self.batches}, {self.micro_batches}, {self.comm_s}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancerState:
    """What the balancer remembers between two decisions; a fresh one knows nothing.

    Start afresh when something else than the split changes how fast the devices compute (AMP,
    TF32, another model); after a change of the devices, `keep` the survivors.

    Args:
        paces: Each rank's compute times by size.
        windows: Windows that led to a decision, so far.
        replans: Re-plans so far.
        agreeing: Windows running, until now, that wanted a re-plan.
        cool_down: Windows to let pass before the next re-plan.
        patience: Windows of cool-down after the next re-plan.
        promised: After a re-plan, until its effect is measured: the slowest rank's compute before
            it and the one predicted for after it, in seconds.

    Example:
        >>> window = Window(
        ...     batches=(50, 50),
        ...     micro_batches=(100, 100),
        ...     observations=(
        ...         (Observation(batch=50, micro_steps=1, compute_s=0.5),) * 5,
        ...         (Observation(batch=50, micro_steps=1, compute_s=1.5),) * 5,
        ...     ),
        ... )
        >>> state, decision = decide(BalancerState(), window)
        >>> decision.batches, decision.predicted_gain
        ((75, 25), 0.5)
    """

    paces: tuple[Pace, ...] = ()
    windows: int = 0
    replans: int = 0
    agreeing: int = 0
    cool_down: int = 0
    patience: int = _COOL_DOWN
    promised: tuple[float, float] | None = None

    @property
    def warming_up(self) -> bool:
        """Whether the next window acts at once: the first does, and the one after its re-plan."""
        return self.windows == self.replans < 2

    def models(self) -> tuple[ComputeTime | None, ...]:
        """Returns each rank's fitted step time; None for a rank that never had work."""
        return tuple(pace.model() for pace in self.paces)

    def keep(self, ranks: Sequence[int]) -> "BalancerState":
        """Returns a fresh state that knows the paces of ``ranks`` only, renumbered in order."""
        return BalancerState(paces=tuple(self.paces[rank] for rank in ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do from the next grant on, and why.

    Args:
        batches: Samples per rank from now on; None: stay.
        predicted_gain: 1 − ``new_s``/``now_s``; None while it cannot be told.
        now_s: The step now: measured compute of the slowest rank, plus the exchange, in seconds.
        new_s: The predicted step of the best split, whether it is taken or not, in seconds.
        reason: Why, for a person to read.
        outcome: What it comes to.

    Example:
        >>> Decision(reason="too few steps").batches is None
        True
    """

    reason: str
    outcome: Outcome = "measuring"
    batches: tuple[int, ...] | None = None
    predicted_gain: float | None = None
    now_s: float | None = None
    new_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """The best split for a window, and the gain that it must have to be made."""

    batches: tuple[int, ...]
    now_s: float
    new_s: float
    comm_s: float
    needed: float

    @property
    def gain(self) -> float:
        return 1 - self.new_s / self.now_s

    def decided(self, outcome: Outcome, reason: str) -> Decision:
        return Decision(
            reason=reason,
            outcome=outcome,
            batches=self.batches if outcome == "replan" else None,
            predicted_gain=self.gain,
            now_s=self.now_s,
            new_s=self.new_s,
        )


def observe(state: BalancerState, window: Window) -> BalancerState:
    """Returns the state with the window's observations in it, without deciding anything.

    Raises:
        PlanError: The window is of another number of ranks than the state.
    """
    paces = state.paces or (Pace(),) * len(window.batches)
    if len(paces) != len(window.batches):
        raise PlanError(
            f"the balancer knows {len(paces)} ranks and was given {len(window.batches)}: keep() "
            "the survivors of its state, or start with a fresh one."
        )
    rows = zip(paces, window.observations, strict=True)
    return replace(state, paces=tuple(pace.take(seen) for pace, seen in rows))


def decide(state: BalancerState, window: Window) -> tuple[BalancerState, Decision]:
    """Takes a window in and decides whether to split the batch anew.

    Args:
        state: What the last call returned, or a fresh `BalancerState`.
        window: What was observed since.

    Returns:
        The state for the next call, and the decision.

    Raises:
        PlanError: The window does not fit the state, or no split satisfies its bounds.
    """
    state = observe(state, window)
    running = _running(state, window)
    models: list[ComputeTime] = []
    for rank, (pace, now) in enumerate(zip(state.paces, running, strict=True)):
        model = pace.model(now)
        if model is None or (window.batches[rank] and (not now or len(now.times) < LEAST_TIMES)):
            return state, Decision(reason=f"too few steps of rank {rank} have been measured yet")
        models.append(model)
    errors = [
        pace.error(len(now.times)) * now.middle.seconds if now else 0.0
        for pace, now in zip(state.paces, running, strict=True)
    ]
    correcting = state.warming_up and state.windows > 0
    least_gain = _LEAST_CORRECTION if correcting else _LEAST_GAIN
    proposal = _propose(models, max(errors), window, least_gain)
    state = _held_to_promise(state, proposal.now_s - window.comm_s)
    return _act(state, proposal)


def _running(state: BalancerState, window: Window) -> list[SizeTimes | None]:
    """Returns what is known of each rank's present size; None for a rank without work."""
    rows = zip(state.paces, window.batches, window.micro_batches, strict=True)
    return [pace.at(batch, -(-batch // micro)) for pace, batch, micro in rows]


def _propose(
    models: Sequence[ComputeTime], error_s: float, window: Window, least_gain: float
) -> _Proposal:
    micro_batches = window.micro_batches
    now_s = step_seconds(models, window.batches, micro_batches) + window.comm_s
    batches = split_batch(
        models,
        sum(window.batches),
        micro_batches=micro_batches,
        floors=window.floors or (1,) * len(models),
        caps=window.caps,
        granularity=window.granularity,
    )
    new_s = step_seconds(models, batches, micro_batches) + window.comm_s
    needed = max(least_gain, _SIGMAS * error_s / now_s)
    return _Proposal(batches=batches, now_s=now_s, new_s=new_s, comm_s=window.comm_s, needed=needed)


def _held_to_promise(state: BalancerState, now_s: float) -> BalancerState:
    """Compares the last re-plan's effect with its promise, and waits longer if it fell short."""
    if state.promised is None:
        return state
    before_s, predicted_s = state.promised
    if before_s - now_s >= (before_s - predicted_s) / 2:
        return replace(state, promised=None, patience=_COOL_DOWN)
    longer = min(2 * state.patience, _LONGEST_COOL_DOWN)
    return replace(state, promised=None, patience=longer, cool_down=longer)


def _act(state: BalancerState, proposal: _Proposal) -> tuple[BalancerState, Decision]:
    """Takes the proposed split, or says why not."""
    warming_up, cooling, agreeing = state.warming_up, state.cool_down, 0
    state = replace(state, windows=state.windows + 1, cool_down=max(0, cooling - 1))
    gain, needed = f"{proposal.gain:.1%}", f"{proposal.needed:.1%}"
    faster = f"{proposal.now_s / proposal.new_s:.2f}× as fast predicted"
    outcome: Outcome = "replan"
    if proposal.gain <= proposal.needed:
        reason = f"balanced: a new split would gain {gain}, {needed} is needed"
        outcome = "balanced"
    elif warming_up:
        reason = f"first measurements: {faster}"
    else:
        agreeing = state.agreeing + 1
        reason = f"{faster} in {agreeing} windows running"
        if cooling:
            reason += f", cooling down for {cooling} more"
        elif agreeing < 2:
            reason += ", waiting for the next to agree"
        outcome = "replan" if agreeing > 1 and not cooling else "waiting"
    decision = proposal.decided(outcome, reason)
    if decision.batches is None:
        return replace(state, agreeing=agreeing), decision
    state = replace(state, replans=state.replans + 1, agreeing=0)
    if not warming_up:
        promised = (proposal.now_s - proposal.comm_s, proposal.new_s - proposal.comm_s)
        state = replace(state, promised=promised, cool_down=state.patience)
    return state, decision
