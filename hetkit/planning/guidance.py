r"""Until when a slow card pays, and what a further or a better one would bring, for this task.

There is no speed ratio or memory gap that is right for all tasks; but with the step times, the
exchange and the rest of the step known, T(with) and T(without) can be worked out for this one:

    T(S) = max_{i ∈ S} t_i(b_i) + exchange(|S|) + rest,     with the best split over S.

A kind of card stops paying at the slowness f·t_i for which T(with) = T(without): both are found by
halving the range of f. So is the least micro-batch (what a smaller memory would leave) at which it
still pays: with it come more passes, and each costs the device's fixed time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetkit.planning.batch_split import split_batch, step_seconds
from hetkit.planning.step_time import ComputeTime, StepTime

_HALVINGS = 40
_MOST = 1e6
_NO_RATIO = 0.01
"""No card is a hundred times faster than the fastest: below this ratio none pays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What one kind of device is worth beside the fastest kind.

    Args:
        name: The kind, and how many there are of it.
        count: How many.
        ratio: How many times slower one of it computes than one of the fastest kind.
        with_s, without_s: The step with all devices, and without this kind; None where the others
            cannot do without it.
        pays_until: The ratio from which on the step is shorter without it; infinite: there is none.
        least_micro_batch: The least micro-batch with which it still pays; None where none does.

    Example:
        >>> Worth(name="V100", count=4, ratio=2.3, with_s=0.9, without_s=1.0, pays_until=6.0,
        ...       least_micro_batch=2).text
        '4 × V100, each 2.3× slower: the step takes 900.0 ms with them, 1,000.0 ms without; they \
pay until they are 6.0× slower, and with micro-batches of 2 or more'
    """

    name: str
    count: int
    ratio: float
    with_s: float
    without_s: float | None
    pays_until: float
    least_micro_batch: int | None

    @property
    def text(self) -> str:
        """The finding in one sentence."""
        them, pay = ("them", "they pay") if self.count > 1 else ("it", "it pays")
        each = ", each" if self.count > 1 else ","
        text = f"{self.count} × {self.name}{each} {self.ratio:.1f}× slower: the step takes "
        text += f"{_ms(self.with_s)} with {them}"
        if self.without_s is None:
            return text
        text += f", {_ms(self.without_s)} without"
        if self.least_micro_batch is None:
            if self.pays_until < _NO_RATIO:
                return f"{text}; no speed would make up for the exchange, so leave {them} out"
            return f"{text}; {pay} up to {self.pays_until:.2f}×, so leave {them} out"
        until = "always"
        if math.isfinite(self.pays_until):
            verb = "they are" if self.count > 1 else "it is"
            until = f"until {verb} {self.pays_until:.1f}× slower"
        return f"{text}; {pay} {until}, and with micro-batches of {self.least_micro_batch} or more"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """Hardware guidance with its numbers; prints as text.

    Args:
        step_s: The step with all devices and the best split.
        worths: Of each kind but the fastest.
        further: ``(what, step)`` of fleets that one does not have.
        basis: Where the figures come from.

    Example:
        >>> print(Guidance(step_s=0.2, worths=(), further=(("one more A100", 0.15),), basis="test"))
        All devices: 200.0 ms a step (test).
        one more A100: 150.0 ms, 1.33× as fast
    """

    step_s: float
    worths: tuple[Worth, ...]
    further: tuple[tuple[str, float], ...]
    basis: str

    def __str__(self) -> str:
        return "\n".join(
            [
                f"All devices: {_ms(self.step_s)} a step ({self.basis}).",
                *(worth.text for worth in self.worths),
                *(
                    f"{what}: {_ms(step_s)}, {self.step_s / step_s:.2f}× as fast"
                    for what, step_s in self.further
                ),
            ]
        )

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Devices as their step times, and what a step costs beside computing."""

    models: tuple[ComputeTime, ...]
    micro_batches: tuple[int, ...]
    total: int
    exchange_s: Callable[[int], float]
    rest_s: float

    def step_s(self, ranks: Sequence[int] | None = None) -> float:
        """Returns the best step over some of the devices; infinite where there is none."""
        chosen = range(len(self.models)) if ranks is None else ranks
        if not 0 < len(chosen) <= self.total:
            return math.inf
        models = [self.models[rank] for rank in chosen]
        micro = [self.micro_batches[rank] for rank in chosen]
        split = split_batch(models, self.total, micro_batches=micro, floors=[1] * len(models))
        exchange_s = self.exchange_s(len(models)) if len(models) > 1 else 0.0
        return step_seconds(models, split, micro) + exchange_s + self.rest_s

    def replaced(self, models: dict[int, ComputeTime], micro: dict[int, int]) -> "_Fleet":
        """Returns the fleet with some devices' times and micro-batches changed."""
        return _Fleet(
            tuple(models.get(rank, model) for rank, model in enumerate(self.models)),
            tuple(micro.get(rank, size) for rank, size in enumerate(self.micro_batches)),
            self.total,
            self.exchange_s,
            self.rest_s,
        )

    def grown(self, like: int) -> "_Fleet":
        """Returns the fleet with one device more, of a rank's kind."""
        models = (*self.models, self.models[like])
        micro = (*self.micro_batches, self.micro_batches[like])
        return _Fleet(models, micro, self.total, self.exchange_s, self.rest_s)


def guide(
    names: Sequence[str],
    models: Sequence[ComputeTime],
    total: int,
    *,
    micro_batches: Sequence[int],
    exchange_s: Callable[[int], float],
    rest_s: float = 0.0,
    emulated: bool = False,
    basis: str = "predicted from measured step times",
) -> Guidance:
    """Works out what each kind of device is worth, and what a further one would bring.

    Args:
        names: Kind of each device; devices of one name are one kind.
        models: Compute time of each device.
        total: Samples in a step.
        micro_batches: Largest micro-batch of each device.
        exchange_s: Seconds of exchange that hold up a step of so many ranks.
        rest_s: What a step takes beside, whatever the devices.
        emulated: Whether the devices are emulated.
        basis: Where the step times come from.

    Example:
        >>> fast, slow = (StepTime(launch_s=0.0, sample_s=c) for c in (0.001, 0.003))
        >>> found = guide(["A", "B"], [fast, slow], 120, micro_batches=[120, 120],
        ...               exchange_s=lambda n: 0.02)
        >>> round(found.worths[0].ratio, 2), round(found.worths[0].pays_until, 1)
        (3.0, 4.8)
    """
    fleet = _Fleet(tuple(models), tuple(micro_batches), total, exchange_s, rest_s)
    share = max(1, total // len(models))
    times = [m.seconds(share, micro) for m, micro in zip(models, micro_batches, strict=True)]
    kinds: dict[str, list[int]] = {}
    for rank in sorted(range(len(names)), key=lambda rank: times[rank]):
        kinds.setdefault(names[rank], []).append(rank)
    fastest, *others = kinds
    best = kinds[fastest][0]
    worths = [_worth(fleet, kind, kinds[kind], times, best) for kind in others]
    further = [(f"one more {kind}", fleet.grown(kinds[kind][0]).step_s()) for kind in kinds]
    for kind in others:
        swapped = dict.fromkeys(kinds[kind], fleet.models[best])
        sizes = dict.fromkeys(kinds[kind], fleet.micro_batches[best])
        what = f"{fastest} in place of {len(kinds[kind])} × {kind}"
        further.append((what, fleet.replaced(swapped, sizes).step_s()))
    return Guidance(
        step_s=fleet.step_s(),
        worths=tuple(worths),
        further=tuple(further),
        basis=basis + (", emulated" if emulated else ""),
    )


def _worth(
    fleet: _Fleet, kind: str, ranks: Sequence[int], times: Sequence[float], best: int
) -> Worth:
    rest = [rank for rank in range(len(fleet.models)) if rank not in ranks]
    with_s, without_s = fleet.step_s(), fleet.step_s(rest)

    def pays_at(factor: float) -> bool:
        slower = {
            rank: _slowed(fleet.models[rank], factor, fleet.micro_batches[rank]) for rank in ranks
        }
        return fleet.replaced(slower, {}).step_s() < without_s

    def pays_with(micro: int) -> bool:
        return fleet.replaced({}, dict.fromkeys(ranks, micro)).step_s() < without_s

    ratio = times[ranks[0]] / times[best]
    return Worth(
        name=kind,
        count=len(ranks),
        ratio=ratio,
        with_s=with_s,
        without_s=without_s if math.isfinite(without_s) else None,
        pays_until=ratio * _last_factor(pays_at),
        least_micro_batch=_least_size(pays_with, fleet.micro_batches[ranks[0]]),
    )


def _slowed(model: ComputeTime, factor: float, micro: int) -> ComputeTime:
    if isinstance(model, StepTime):
        return StepTime(launch_s=model.launch_s * factor, sample_s=model.sample_s * factor)
    return StepTime(launch_s=0.0, sample_s=model.seconds(micro, micro) / micro * factor)


def _last_factor(pays: Callable[[float], bool]) -> float:
    """Returns the factor up to which a device pays; infinite where it always does."""
    low, high = 1 / _MOST, _MOST
    if pays(high):
        return math.inf
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _least_size(pays: Callable[[int], bool], most: int) -> int | None:
    """Returns the least micro-batch with which a device pays; None where it does with none."""
    if not pays(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
