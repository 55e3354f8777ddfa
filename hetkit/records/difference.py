r"""Two epochs side by side: what differs, and whether the difference is more than noise.

Each epoch's figure comes with a standard error *e* from *k* blocks of its own steps
(`hetkit.records.noise`). The two epochs are of unlike length and unlike scatter, so the interval of
their difference is Welch's [1]_::

    b − a  ±  t · √(e_a² + e_b²)

with *t* the 97.5 % quantile of Student's distribution for the degrees of freedom of Welch and
Satterthwaite, ν = (e_a² + e_b²)² / (e_a⁴/(k_a − 1) + e_b⁴/(k_b − 1)). Where it covers 0 there is
*no clear difference*. Of many figures that do not differ, one in twenty looks clear by chance.

The interval holds for these two stretches of time on this machine. What else changed between them
(a hot card, another program) is part of the difference.

.. [1] B. L. Welch, "The generalization of 'Student's' problem when several different population
   variances are involved", Biometrika 34 (1947).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from hetkit.records.epochs import SPLIT, LedgerRow
from hetkit.records.noise import Noise
from hetkit.records.report import (
    DASH,
    dash,
    fold,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    html_table,
    text_table,
)

_Z = NormalDist().inv_cdf(0.975)
_HEADERS = ("figure", "epoch {a}", "epoch {b}", "difference", "95 % interval", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One figure of two epochs.

    Args:
        name: The figure's field in `LedgerRow`; of a validation metric ``val_`` and its name.
        a: Its value in the first epoch, or None.
        b: Its value in the second.
        low: Lower end of the 95 % interval of ``b − a``; None where the noise is not known.
        high: Upper end.

    Example:
        >>> Difference(name="step_s", a=0.2, b=0.1, low=-0.11, high=-0.09).clear
        True
    """

    name: str
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> float | None:
        """``b − a``."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def clear(self) -> bool | None:
        """Whether the interval leaves 0 out; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class EpochComparison:
    """Two epochs, figure by figure; shows as a table in text and in notebooks.

    Args:
        a: Number of the first epoch.
        b: Number of the second.
        settings: What was set differently, each with both values.
        differences: The figures, in the order they are shown. The parts of a step are those of
            each epoch's critical rank.
        emulated: Whether any device is emulated.

    Example:
        >>> step = Difference(name="step_s", a=0.2, b=0.1, low=-0.11, high=-0.09)
        >>> print(EpochComparison(a=0, b=3, settings=("amp: off → bf16",), differences=(step,)))
        Epoch 3 against epoch 0: amp: off → bf16
        figure  epoch 0  epoch 3  difference       95 % interval
        ──────  ───────  ───────  ──────────  ──────────────────  ─────
        step     200 ms   100 ms     −100 ms  −110 ms … −90.0 ms  clear
    """

    a: int
    b: int
    settings: tuple[str, ...]
    differences: tuple[Difference, ...]
    emulated: bool = False

    def __getitem__(self, name: str) -> Difference:
        """Returns the difference of one figure.

        Raises:
            KeyError: There is none of that name.
        """
        for difference in self.differences:
            if difference.name == name:
                return difference
        raise KeyError(f"{name!r} is not compared; there are: {[d.name for d in self.differences]}")

    @property
    def _title(self) -> str:
        what = "; ".join(self.settings) or "the same settings"
        mark = " (emulated)" if self.emulated else ""
        return f"Epoch {self.b} against epoch {self.a}{mark}: {what}"

    @property
    def _heads(self) -> list[str]:
        return [head.format(a=self.a, b=self.b) for head in _HEADERS]

    def __str__(self) -> str:
        rows = [_cells(difference) for difference in self.differences]
        return "\n".join([fold(self._title), text_table(self._heads, rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [_cells(difference) for difference in self.differences]
        return html_table(self._heads, rows, caption=self._title)


def compare_epochs(a: LedgerRow, b: LedgerRow) -> EpochComparison:
    """Returns what differs between two epochs, ``b − a``, with the noise of each figure."""
    left, right = _figures(a), _figures(b)
    names = list(dict.fromkeys((*left, *right)))
    return EpochComparison(
        a=a.epoch,
        b=b.epoch,
        settings=_settings(a, b),
        differences=tuple(
            _difference(name, left.get(name), right.get(name), a.noise, b.noise) for name in names
        ),
        emulated=a.emulated or b.emulated,
    )


def student_quantile(freedom: float) -> float:
    """Returns the 97.5 % quantile of Student's t, to 1 % from 3 degrees of freedom on.

    By the expansion of Cornish and Fisher around the normal quantile (Abramowitz and Stegun,
    26.7.5).

    Example:
        >>> [round(student_quantile(freedom), 2) for freedom in (5, 10, 38)]
        [2.57, 2.23, 2.02]
    """
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _figures(row: LedgerRow) -> dict[str, float | None]:
    critical = row.ranks.index(row.critical_rank)
    peaks = [peak for peak in row.memory_peak_bytes if peak is not None]
    figures: dict[str, float | None] = {
        "samples_per_s": row.samples_per_s,
        "step_s": row.step_s,
        **{f"{part}_s": getattr(row, f"{part}_s")[critical] for part in SPLIT},
        "comm_share": row.comm_share,
        "compute_spread": row.compute_spread,
        "wire_bytes": row.wire_bytes,
        "memory_peak_bytes": max(peaks, default=None),
        "loss": row.loss,
        "guard_cosine": row.guard_cosine,
        **{f"val_{name}": value for name, value in row.metrics.items()},
    }
    return {name: value for name, value in figures.items() if value is not None}


def _settings(a: LedgerRow, b: LedgerRow) -> tuple[str, ...]:
    names = ("batches", "micro_batches", "amp", "compression", "sync_every", "global_batch", "lr")
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in names)
    return tuple(f"{name}: {_plain(x)} → {_plain(y)}" for name, x, y in pairs if x != y)


def _difference(
    name: str,
    a: float | None,
    b: float | None,
    noise_a: Mapping[str, Noise],
    noise_b: Mapping[str, Noise],
) -> Difference:
    known = a is not None and b is not None and name in noise_a and name in noise_b
    if not known:
        return Difference(name=name, a=a, b=b)
    half = _half_width(noise_a[name], noise_b[name])
    change = b - a  # type: ignore[operator]
    return Difference(name=name, a=a, b=b, low=change - half, high=change + half)


def _half_width(a: Noise, b: Noise) -> float:
    square_a, square_b = a.error**2, b.error**2
    both = square_a + square_b
    if both == 0:
        return 0.0
    # In shares of the sum: the squares of very small errors would vanish.
    part_a, part_b = square_a / both, square_b / both
    freedom = 1 / (part_a**2 / (a.blocks - 1) + part_b**2 / (b.blocks - 1))
    return student_quantile(freedom) * math.sqrt(both)


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        same = len(set(value)) == 1
        return str(value[0]) if same else " + ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cells(difference: Difference) -> list[str]:
    name, form = difference.name, _form(difference.name)
    low, high = difference.low, difference.high
    interval = (
        DASH if low is None or high is None else f"{_signed(low, form)} … {_signed(high, form)}"
    )
    words = {None: "", True: "clear", False: "no clear difference"}
    return [
        _title(name),
        dash(difference.a, form),
        dash(difference.b, form),
        dash(difference.change, lambda change: _signed(change, form)),
        interval,
        words[difference.clear],
    ]


def _signed(value: float, form: Callable[[float], str]) -> str:
    return ("−" if value < 0 else "+") + form(abs(value))


def _form(name: str) -> Callable[[float], str]:
    if name.endswith("_bytes"):
        return format_bytes
    if name == "samples_per_s":
        return format_number
    if name.endswith("_s"):
        return format_seconds
    return format_share if name in ("comm_share", "compute_spread") else "{:.4g}".format


def _title(name: str) -> str:
    words = {"samples_per_s": "samples/s", "wire_bytes": "sent", "memory_peak_bytes": "memory"}
    return words.get(name, name.removesuffix("_s").replace("_", " "))
