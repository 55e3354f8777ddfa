r"""Which sets of the devices to compare, and which of them makes the shortest step.

A set S of devices takes, with the optimal split over it and one sample at least for each,

    T(S) = max_{i ∈ S} t_i(b_i) + exchange(|S|).

Devices whose times for an even share and for the whole batch are within 5 % of each other, with
the same bounds, are one *class*: of a class only its number matters, and its fastest are taken
first. Two A100 and four V100 make 3 × 5 − 1 = 14 sets, eight devices all different 255, and all of
them are tried. When there are more than 256, the *k* fastest devices are tried for each *k*, and
from the best of these one device is put in or taken out for as long as that shortens the step.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hetkit.planning.batch_split import even_split, split_batch, step_seconds
from hetkit.planning.step_time import ComputeTime

_ALIKE = 1.05
_MOST_SETS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to use the devices, and what it is predicted to do.

    Args:
        name: What it is called: ``"all devices, balanced"``, ``"best subset"`` …
        ranks: The devices it uses, by their place in the fleet.
        batches: Samples of each of ``ranks`` in a step.
        step_s: Predicted seconds of a step, exchange included.
        samples_per_s: Predicted throughput.

    Example:
        >>> Choice(
        ...     name="fastest alone", ranks=(0,), batches=(64,), step_s=0.5, samples_per_s=128.0
        ... ).ranks
        (0,)
    """

    name: str
    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    step_s: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSets:
    """The devices of a fleet, as something to choose sets from; the lists are equally long.

    Args:
        models: Compute time of each device, of any shape.
        total: Samples in a step.
        micro_batches: Largest micro-batch of each device.
        caps: Most samples of each device.
        exchange_s: Seconds of exchange that hold up a step of so many ranks.

    Example:
        >>> from hetkit.planning.step_time import StepTime
        >>> devices = DeviceSets(
        ...     models=(StepTime(launch_s=0.0, sample_s=1.0), StepTime(launch_s=0.0, sample_s=9.0)),
        ...     total=10,
        ...     micro_batches=(10, 10),
        ...     caps=(10, 10),
        ...     exchange_s=lambda ranks: 2.0 if ranks > 1 else 0.0,
        ... )
        >>> devices.fastest().ranks
        (0,)
    """

    models: tuple[ComputeTime, ...]
    total: int
    micro_batches: tuple[int, ...]
    caps: tuple[int, ...]
    exchange_s: Callable[[int], float]

    def balanced(self, name: str, ranks: Sequence[int]) -> Choice | None:
        """Returns the optimal split over ``ranks``; None where the bounds forbid any."""
        caps = [self.caps[rank] for rank in ranks]
        if not 0 < len(ranks) <= self.total <= sum(caps) or min(caps) < 1:
            return None
        batches = split_batch(
            [self.models[rank] for rank in ranks],
            self.total,
            micro_batches=[self.micro_batches[rank] for rank in ranks],
            floors=[1] * len(ranks),
            caps=caps,
        )
        return self._choice(name, ranks, batches)

    def even(self, name: str) -> Choice | None:
        """Returns the even split over all; None where the bounds forbid it."""
        batches = even_split(self.total, len(self.models))
        if min(batches) < 1 or any(b > cap for b, cap in zip(batches, self.caps, strict=True)):
            return None
        return self._choice(name, range(len(batches)), batches)

    def alone(self) -> Choice | None:
        """Returns the fastest single device; None where none can take the whole batch."""
        return self._best("fastest alone", ([rank] for rank in range(len(self.models))))

    def fastest(self) -> Choice | None:
        """Returns the set with the shortest step, the smaller at a tie; None if none can do it."""
        name, classes = "best subset", self._classes()
        if math.prod(len(members) + 1 for members in classes) <= _MOST_SETS:
            counts = itertools.product(*(range(len(members) + 1) for members in classes))
            rows = (zip(classes, count, strict=True) for count in counts)
            return self._best(
                name, ([r for members, k in row for r in members[:k]] for row in rows)
            )
        by_speed = list(itertools.chain.from_iterable(classes))
        best = self._best(name, (by_speed[:k] for k in range(1, len(by_speed) + 1)))
        while best is not None:
            toggled = (sorted({*best.ranks} ^ {rank}) for rank in by_speed)
            better = self._best(name, [best.ranks, *toggled])
            if better is None or better.ranks == best.ranks:
                break
            best = better
        return best

    def _best(self, name: str, sets: Iterable[Sequence[int]]) -> Choice | None:
        tried = (self.balanced(name, sorted(ranks)) for ranks in sets)
        return min(
            (choice for choice in tried if choice is not None),
            key=lambda choice: (choice.step_s, len(choice.ranks), choice.ranks),
            default=None,
        )

    def _choice(self, name: str, ranks: Sequence[int], batches: Sequence[int]) -> Choice:
        models = [self.models[rank] for rank in ranks]
        micro_batches = [self.micro_batches[rank] for rank in ranks]
        step_s = step_seconds(models, batches, micro_batches) + self.exchange_s(len(ranks))
        return Choice(
            name=name,
            ranks=tuple(ranks),
            batches=tuple(batches),
            step_s=step_s,
            samples_per_s=self.total / step_s,
        )

    def _classes(self) -> list[list[int]]:
        """Groups devices that behave alike, the fastest in an even split first."""
        shares = (-(-self.total // len(self.models)), self.total)
        rows = zip(self.models, self.micro_batches, strict=True)
        times = [[model.seconds(share, micro) for share in shares] for model, micro in rows]
        bounds = list(zip(self.micro_batches, self.caps, strict=True))
        classes: list[list[int]] = []
        for rank in sorted(range(len(times)), key=lambda rank: (times[rank], rank)):
            for members in classes:
                first = members[0]
                ratios = [a / b for a, b in zip(times[rank], times[first], strict=True)]
                alike = min(ratios) >= 1 / _ALIKE and max(ratios) <= _ALIKE
                if alike and bounds[rank] == bounds[first]:
                    members.append(rank)
                    break
            else:
                classes.append([rank])
        return classes
