"""Balance: gathers the windows that the balancer decides on, step by step."""

from collections.abc import Sequence

from hetkit.plan import Plan
from hetkit.planning.balancer import BalancerState, Decision, Window, decide, observe
from hetkit.planning.pace import Pace
from hetkit.planning.step_time import ComputeTime, Observation

DROPPED_STEPS = 2
"""Steps after a change of the split that no window counts: caches and allocators settle."""

WINDOW_STEPS = 5

WARM_WINDOWS = 2
"""Windows after which the devices are known: the first teaches one size, the second another."""


class Balance:
    """What the coordinator keeps about the ranks' compute times.

    ::

        steps   0 1 │ 2 3 4 5 6 │ 7 8 │ 9 … 13 │ …
                drop   window     drop   window
                          ↑ plan from step 7     no grant goes past the window while warming up

    Example:
        >>> balance = Balance()
        >>> balance.restart(first_step=0)
        >>> balance.warm_until
        7
    """

    def __init__(self) -> None:
        self._state = BalancerState()
        self._counts_from = DROPPED_STEPS
        self._last_step = 0
        self._rows: list[tuple[Observation | None, ...]] = []

    def restart(self, first_step: int) -> None:
        """The split changes at ``first_step``: steps before it, and its first two, don't count."""
        self._counts_from = first_step + DROPPED_STEPS
        self._rows = []

    def seat(self, kept: Sequence[int | None]) -> None:
        """Other ranks compute from now on: each was ``kept`` from a rank before, or is new."""
        before = self._state.paces
        paces = [Pace() if rank is None else before[rank] for rank in kept if before]
        warm = bool(paces) and None not in kept
        self._state = BalancerState(paces=tuple(paces), windows=WARM_WINDOWS if warm else 0)
        self._rows = []

    def forget(self) -> None:
        """Something else than the split has changed how fast the devices compute."""
        self._state = BalancerState()

    @property
    def warm_until(self) -> int | None:
        """The step that no grant should pass before a decision; None once two were made."""
        return None if self._state.windows >= WARM_WINDOWS else self._counts_from + WINDOW_STEPS

    @property
    def undecided(self) -> bool:
        """Whether no decision was made yet, so that the split is whatever it began with."""
        return not self._state.windows

    @property
    def full(self) -> bool:
        """Whether a window is complete."""
        return len(self._rows) >= WINDOW_STEPS

    def counts(self, step: int) -> bool:
        """Whether a step belongs to the present window."""
        return step >= self._counts_from

    def add(self, step: int, ranks: Sequence[Observation | None]) -> None:
        """Takes what the ranks measured in a step; None for a rank without samples."""
        if self.counts(step):
            self._rows.append(tuple(ranks))
            self._last_step = step

    def learn(self, plan: Plan) -> None:
        """Takes the window in without deciding anything, for the verdict and for later."""
        self._state = observe(self._state, self._window(plan, None, 0.0))
        self._next_window()

    def decide(
        self,
        plan: Plan,
        *,
        caps: tuple[int, ...] | None = None,
        comm_s: float = 0.0,
        granularity: int = 1,
    ) -> Decision:
        """Takes the window in and decides on the split."""
        window = self._window(plan, caps, comm_s, granularity)
        self._state, decision = decide(self._state, window)
        self._next_window()
        return decision

    def models(self) -> tuple[ComputeTime, ...] | None:
        """Returns each rank's fitted step time; None until all of them are known."""
        models = self._state.models()
        known = tuple(model for model in models if model is not None)
        return known if models and len(known) == len(models) else None

    @property
    def paces(self) -> tuple[Pace, ...]:
        """What is remembered of each rank's compute times."""
        return self._state.paces

    @property
    def error(self) -> float:
        """The standard error of the present compute times, as a share, at the worst rank."""
        running = [(pace, pace.sizes[-1]) for pace in self._state.paces if pace.sizes]
        return max((pace.error(len(size.times)) for pace, size in running), default=0.0)

    def _next_window(self) -> None:
        self._counts_from = self._last_step + 1
        self._rows = []

    def _window(
        self, plan: Plan, caps: tuple[int, ...] | None, comm_s: float, granularity: int = 1
    ) -> Window:
        by_rank = zip(*self._rows, strict=True) if self._rows else [() for _ in plan.batches]
        return Window(
            batches=plan.batches,
            micro_batches=plan.micro_batches,
            observations=tuple(
                tuple(seen for seen in rank if seen is not None) for rank in by_rank
            ),
            caps=caps,
            granularity=granularity,
            comm_s=comm_s,
        )
