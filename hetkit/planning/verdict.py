r"""Is the slow card worth it: all devices, the best of them, or the fastest alone?

With *v_i* the speed of device *i* alone, *n* unlike devices make about (EVIDENCE.md §2)::

    split evenly   n · min v_i      everybody waits for the slowest
    balanced       Σ v_i            less what the exchange takes
    alone          max v_i          no exchange at all

so an even split over 2.3 : 1 is slower than the fast card alone when the exchange is dear, while
the balanced one may be worth it or not. The verdict works each out as a whole step,

    T(S) = max_{i ∈ S} t_i(b_i) + exchange(|S|),

with the optimal split over the devices of S, each with one sample at least. A device is kept only
if T with it is less than T without it; of two sets that are equally fast, the smaller is better.

Two sets whose steps differ by less than 5 %, or by less than three standard errors of the measured
times, cannot be told apart: then there is *no clear gain*, whichever is ahead.

The step times are fitted to measured ones, so the figures are *predicted from measured step
times*; they say so, and whether the devices are emulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from hetkit.errors import PlanError
from hetkit.planning.batch_split import imbalance_floor
from hetkit.planning.device_sets import Choice, DeviceSets
from hetkit.planning.step_time import ComputeTime

MEASURED = "measured step times"
"""What a verdict is predicted from, unless it says otherwise."""

_LEAST_GAIN = 0.05
_SIGMAS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What to do with the devices, with the predicted throughput of each choice.

    Args:
        labels: The devices' names, by their place in the fleet.
        balanced: All devices with the best split; None where the bounds forbid it.
        even: All devices with the even split; None where the bounds forbid it.
        best_subset: The fastest set of devices, which may be all or one.
        fastest_alone: The best single device; None where none can take the whole batch.
        spread_floor: The least spread of compute times that a split of samples can reach in the
            best choice, as a share of its compute time.
        emulated: Whether the step times are those of emulated devices.
        error: Standard error of the measured times, as a share, at the worst device. Default 0.
        holds_for: The settings that it holds for, for a person to read. Default: not said.
        source: What it is predicted from.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> fast, slow = StepTime(launch_s=0.0, sample_s=0.001), StepTime(
        ...     launch_s=0.0, sample_s=0.003
        ... )
        >>> print(judge(["A", "B"], [fast, slow], 120, micro_batches=[120, 120]).text)
        Use both devices, balanced: 1,333 samples/s, 2.00× the even split, 1.33× A alone \
(predicted from measured step times).
    """

    labels: tuple[str, ...]
    balanced: Choice | None
    even: Choice | None
    best_subset: Choice
    fastest_alone: Choice | None
    spread_floor: float
    emulated: bool = False
    error: float = 0.0
    holds_for: str = ""
    source: str = MEASURED

    @property
    def basis(self) -> str:
        """Where the figures come from, and what they hold for."""
        emulated = ", emulated" if self.emulated else ""
        settings = f"; for {self.holds_for}" if self.holds_for else ""
        return f"predicted from {self.source}{emulated}{settings}"

    @property
    def margin(self) -> float:
        """The least gain that counts, as a share: 5 %, or three standard errors."""
        return max(_LEAST_GAIN, _SIGMAS * self.error)

    @property
    def rival(self) -> Choice | None:
        """The fastest of the choices of other devices than the best; None where there is none."""
        others = [c for c in (self.balanced, self.fastest_alone) if c is not None]
        others = [choice for choice in others if choice.ranks != self.best_subset.ranks]
        return min(others, key=lambda choice: choice.step_s, default=None)

    @property
    def clear(self) -> bool:
        """Whether the best choice gains more than `margin` on its rival."""
        rival = self.rival
        return rival is None or 1 - self.best_subset.step_s / rival.step_s > self.margin

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        best, alone, rival = self.best_subset, self.fastest_alone, self.rival
        if rival is not None and not self.clear:
            gap = 1 - best.step_s / rival.step_s
            return (
                f"No clear gain: {self._used(best)} and {self._used(rival)} make "
                f"{best.samples_per_s:,.0f} and {rival.samples_per_s:,.0f} samples/s, {gap:.1%} "
                f"apart; {self.margin:.1%} would be clear ({self.basis})."
            )
        gains = []
        if self.even is not None:
            gains.append(f"{self.even.step_s / best.step_s:.2f}× the even split")
        if alone is not None and len(best.ranks) > 1:
            gains.append(f"{alone.step_s / best.step_s:.2f}× {self._used(alone)}")
        if self.balanced is not None and len(best.ranks) < len(self.labels):
            gains.append(f"{self.balanced.step_s / best.step_s:.2f}× all devices, balanced")
        compared = "".join(f", {gain}" for gain in gains)
        only = len(self.labels) == 1
        advice = f"{self.labels[0]} is the only device" if only else f"Use {self._used(best)}"
        return f"{advice}: {best.samples_per_s:,.0f} samples/s{compared} ({self.basis})."

    def _used(self, choice: Choice) -> str:
        used, count = choice.ranks, len(self.labels)
        if len(used) == count:
            return f"{'both' if count == 2 else f'all {count}'} devices, balanced"
        if len(used) == 1:
            return f"{self.labels[used[0]]} alone"
        left_out = ", ".join(self.labels[rank] for rank in range(count) if rank not in used)
        return f"{len(used)} of {count} devices, without {left_out}"

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices there are, in the order in which they are shown."""
        every = (self.balanced, self.even, self.best_subset, self.fastest_alone)
        return tuple(choice for choice in every if choice is not None)

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                choice.name,
                f"{choice.samples_per_s:,.0f}",
                f"{choice.step_s * 1e3:,.1f}",
                " + ".join(
                    f"{self.labels[rank]}: {batch}"
                    for rank, batch in zip(choice.ranks, choice.batches, strict=True)
                ),
            )
            for choice in self.choices
        ]

    def _notes(self) -> tuple[str, str]:
        floor = f"One sample is up to {self.spread_floor:.1%} of the best choice's compute time: "
        return self.text, floor + "no split can be relied on for a smaller spread."

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = ("choice", "samples/s", "step ms", "samples per device")
        rows = [head, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {speed:>{widths[1]}}  {step:>{widths[2]}}  {batches}"
            for name, speed, step, batches in rows
        ]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        )
        text, floor = (escape(note) for note in self._notes())
        return (
            f"<p><b>{text}</b></p><table><thead><tr><th>choice</th><th>samples/s</th>"
            f"<th>step ms</th><th>samples per device</th></tr></thead><tbody>{body}</tbody></table>"
            f"<p>{floor}</p>"
        )


def judge(
    labels: Sequence[str],
    models: Sequence[ComputeTime],
    total: int,
    *,
    micro_batches: Sequence[int],
    caps: Sequence[int] | None = None,
    comm_s: float | Callable[[int], float] = 0.0,
    emulated: bool = False,
    error: float = 0.0,
    holds_for: str = "",
    rest_s: float = 0.0,
    source: str = MEASURED,
) -> Verdict:
    """Compares all devices, the best subset and the fastest alone, by predicted step times.

    Args:
        labels: Name of each device.
        models: Step time of each device, fitted to measured ones.
        total: Samples in a step.
        micro_batches: Largest micro-batch of each device.
        caps: Most samples of each device. Default: no bound, devices accumulate gradients.
        comm_s: Seconds of exchange that hold a step up: a number, the same for two ranks or
            more, or a function of the number of ranks. One rank alone exchanges nothing.
        emulated: Whether the devices are emulated.
        error: Standard error of the measured times, as a share, at the worst device.
        holds_for: The settings that the step times were measured under, for a person to read.
        rest_s: Seconds that each step takes beside, with any devices (the optimizer's, say).
        source: What the figures are predicted from.

    Returns:
        The verdict; prints as a table, and shows as one in a notebook.

    Raises:
        PlanError: The lists differ in length, or no set of devices can take the batch.
    """
    n = len(models)
    caps = [max(1, total)] * n if caps is None else caps
    if n == 0 or not n == len(labels) == len(micro_batches) == len(caps):
        raise PlanError(
            f"give one value per device, for at least one: {len(labels)} labels, {n} models, "
            f"{len(micro_batches)} micro_batches, {len(caps)} caps."
        )
    devices = DeviceSets(
        models=tuple(models),
        total=total,
        micro_batches=tuple(micro_batches),
        caps=tuple(caps),
        exchange_s=_beside(comm_s, rest_s),
    )
    best = devices.fastest()
    if best is None:
        raise PlanError(
            f"no set of devices can take {total} samples a step, at least 1 each: all together "
            f"take at most {sum(caps)}. Choose another global batch, or raise the caps."
        )
    return Verdict(
        labels=tuple(labels),
        balanced=devices.balanced("all devices, balanced", range(n)),
        even=devices.even("all devices, even split"),
        best_subset=best,
        fastest_alone=devices.alone(),
        spread_floor=imbalance_floor(
            [models[rank] for rank in best.ranks],
            best.batches,
            [micro_batches[rank] for rank in best.ranks],
        ),
        emulated=emulated,
        error=error,
        holds_for=holds_for,
        source=source,
    )


def _beside(comm_s: float | Callable[[int], float], rest_s: float) -> Callable[[int], float]:
    def seconds(ranks: int) -> float:
        exchange_s = comm_s(ranks) if callable(comm_s) else comm_s
        return rest_s + (exchange_s if ranks > 1 else 0.0)

    return seconds
