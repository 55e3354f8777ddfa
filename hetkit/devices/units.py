"""Sizes, rates, times and links as people write them: ``"16GB"``, ``"2GB/s, 50us"``.

Two conventions meet here, and each is kept where it is at home. Card makers print "16 GB" and
build 16 · 2³⁰ bytes, so of *memory* GB and GiB both mean 2³⁰. Links are sold in powers of ten, so
of a *rate* GB/s means 10⁹ bytes per second and GiB/s 2³⁰; there a lower-case b could be bits or
bytes, so it is refused: write ``bit`` for bits.
"""

import math
import re
from collections.abc import Mapping

from hetkit.devices.device import Link
from hetkit.errors import DeviceError

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Zµμ/]+)\s*")
_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


def parse_memory(value: object, *, name: str = "memory") -> int:
    """Returns a size of memory in bytes.

    Args:
        value: Bytes as a number, or a text such as ``"16GB"`` or ``"512 MiB"`` (both binary).
        name: What the value is for, in error messages.

    Raises:
        DeviceError: It is neither, or not above 0.

    Example:
        >>> from hetkit.devices.units import parse_memory
        >>> parse_memory("16GB") == parse_memory("16 GiB") == 16 * 2**30
        True
    """
    if isinstance(value, str):
        number, unit = _split(value)
        found = re.fullmatch(r"([kmgt]?)i?b", unit.lower())
        if found is None:
            raise DeviceError(f'{name} must be bytes, or a text such as "16GB": {value!r}.')
        value = number * 1024.0 ** _STEPS[found[1]]
    return int(positive(value, name=name, minimum=1.0))


def parse_rate(value: object, *, name: str = "rate") -> float:
    """Returns a rate in bytes per second.

    Args:
        value: Bytes per second as a number, or a text such as ``"2GB/s"`` (10⁹ bytes),
            ``"2GiB/s"`` (2³⁰ bytes) or ``"25Gbit/s"``.
        name: What the value is for, in error messages.

    Raises:
        DeviceError: It is neither, or not above 0.

    Example:
        >>> from hetkit.devices.units import parse_rate
        >>> parse_rate("25Gbit/s")
        3125000000.0
    """
    if isinstance(value, str):
        number, unit = _split(value)
        found = re.fullmatch(r"([kKmMgGtT]?)(i?)(B|bit)/s", unit)
        if found is None:
            raise DeviceError(
                f'{name} must be bytes per second, or a text such as "2GB/s" or "25Gbit/s" '
                f"(not a lower-case b, which could be either): {value!r}."
            )
        base = 1024.0 if found[2] else 1000.0
        value = number * base ** _STEPS[found[1].lower()] / (8 if found[3] == "bit" else 1)
    return positive(value, name=name)


def parse_seconds(value: object, *, name: str = "time") -> float:
    """Returns a time in seconds, of a number or a text such as ``"50us"``.

    Raises:
        DeviceError: It is neither, or below 0.

    Example:
        >>> from hetkit.devices.units import parse_seconds
        >>> parse_seconds("1.5ms")
        0.0015
    """
    if isinstance(value, str):
        number, unit = _split(value)
        if unit not in _SECONDS:
            raise DeviceError(f'{name} must be seconds, or a text such as "50us": {value!r}.')
        value = number * _SECONDS[unit]
    return at_least_0(value, name=name)


def parse_links(link: object) -> tuple[Link, Link]:
    """Returns the links within a host and between hosts.

    Args:
        link: None (no latency, unlimited), a `Link`, bytes per second, a text such as
            ``"2GB/s"`` or ``"2GB/s, 50us"``, or a mapping of ``"intra"`` and ``"inter"`` to these.

    Raises:
        DeviceError: It is none of these.
    """
    if not isinstance(link, Mapping):
        same = _parse_link(link)
        return same, same
    unknown = [key for key in link if key not in ("intra", "inter")]
    if unknown:
        raise DeviceError(f'a link mapping has the keys "intra" and "inter", not {unknown[0]!r}.')
    return _parse_link(link.get("intra")), _parse_link(link.get("inter"))


def positive(value: object, *, name: str, minimum: float = 0.0) -> float:
    """Returns ``value`` as a float.

    Raises:
        DeviceError: It is not a finite number above 0 and of at least ``minimum``.
    """
    number = _finite(value)
    if number is None or number <= 0 or number < minimum:
        raise DeviceError(f"{name} must be a finite number above 0, not {value!r}.")
    return number


def at_least_0(value: object, *, name: str) -> float:
    """Returns ``value`` as a float.

    Raises:
        DeviceError: It is not a finite number of at least 0.
    """
    number = _finite(value)
    if number is None or number < 0:
        raise DeviceError(f"{name} must be a finite number of at least 0, not {value!r}.")
    return number


def show_memory(size_bytes: float | None) -> str:
    """Returns a size for a table: ``"39.5 GiB"``, or a dash when it is not known."""
    if size_bytes is None:
        return "–"
    scale, unit = (2**30, "GiB") if size_bytes >= 2**30 else (2**20, "MiB")
    return f"{size_bytes / scale:.4g} {unit}"


def show_rate(bytes_per_s: float | None) -> str:
    """Returns a rate for a table: ``"2 GB/s"``, or a dash when it is not known."""
    if bytes_per_s is None:
        return "–"
    if math.isinf(bytes_per_s):
        return "unlimited"
    scale, unit = (1e9, "GB/s") if bytes_per_s >= 1e9 else (1e6, "MB/s")
    return f"{bytes_per_s / scale:.4g} {unit}"


def _parse_link(link: object) -> Link:
    if link is None:
        return Link()
    if isinstance(link, Link):
        return link
    if not isinstance(link, str):
        return Link(bytes_per_s=parse_rate(link, name="link"))
    figures: dict[str, float] = {}
    for part in link.split(","):
        name = "bytes_per_s" if "/" in part else "latency_s"
        if name in figures:
            raise DeviceError(f"link {link!r} gives a {name} twice.")
        figures[name] = (parse_rate if "/" in part else parse_seconds)(part, name="link")
    return Link(**figures)


def _split(text: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise DeviceError(f'{text!r} is not a number with a unit, such as "16GB" or "2GB/s".')
    return float(found[1]), found[2]


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
