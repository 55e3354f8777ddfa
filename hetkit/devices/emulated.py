"""Emulated devices: from ``"2xA100 + 4xV100"`` to devices that behave like those cards.

Where no pace is given it comes from the catalogue, as the geometric mean of the ratios of FP32
peak and of memory bandwidth, since training mixes work bound by either, with the slowest at 1::

    pace_i = √(fp32_i/fp32_j · bandwidth_i/bandwidth_j),   j the slowest

AMP speeds up only the share f of the time that is spent in matrix products (Amdahl)::

    amp_pace = 1 / ((1 − f) + f · fp32_flops/amp_flops)
"""

import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetkit.devices.catalog import find_spec, fold, known_spec
from hetkit.devices.device import Device, DeviceSpec, Emulation, SlowDown
from hetkit.devices.units import at_least_0, parse_links, parse_memory, positive
from hetkit.errors import DeviceError

MOST_DEVICES = 1024
"""More than this in one fleet is taken for a slip of the pen: each is a process."""

_TERM = re.compile(r"([0-9]+)\s*[x×*]\s*(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one emulated device stands: what it is called, and on which host."""

    name: str
    label: str
    host: str
    spec: DeviceSpec | None


def parse_terms(spec: object) -> tuple[tuple[int, str], ...]:
    """Returns (count, name) of each term of ``"2xA100 + 4xV100"``.

    Raises:
        DeviceError: It is not such a text, or a count is 0 or absurd.

    Example:
        >>> from hetkit.devices.emulated import parse_terms
        >>> parse_terms("2×A100 + RTX 3090")
        ((2, 'A100'), (1, 'RTX 3090'))
    """
    if not isinstance(spec, str) or not spec.strip():
        raise DeviceError(f'emulate needs a text such as "2xA100 + 4xV100", not {spec!r}.')
    terms = []
    for term in spec.split("+"):
        found = _TERM.fullmatch(term.strip())
        digits, name = (found[1], found[2]) if found else ("1", term)
        name = " ".join(name.split())
        count = int(digits) if len(digits) <= 4 else MOST_DEVICES + 1
        if not fold(name):
            raise DeviceError(f'{spec!r} has a term without a device: write it as "2xA100".')
        if not 1 <= count <= MOST_DEVICES:
            raise DeviceError(f"{term.strip()!r}: a count must be from 1 to {MOST_DEVICES}.")
        terms.append((count, name))
    return tuple(terms)


def make_places(terms: Sequence[tuple[int, str]]) -> tuple[Place, ...]:
    """Returns the place of each device; each term is one host.

    Raises:
        DeviceError: There are more than `MOST_DEVICES`.
    """
    if sum(count for count, _ in terms) > MOST_DEVICES:
        raise DeviceError(f"a fleet has at most {MOST_DEVICES} devices.")
    seats = [(name, host) for host, (count, name) in enumerate(terms) for _ in range(count)]
    return tuple(
        Place(name=name, label=f"{name} #{index}", host=f"host{host}", spec=known_spec(name))
        for index, (name, host) in enumerate(seats)
    )


def build_devices(
    places: Sequence[Place],
    *,
    pace: Mapping[str, float] | None,
    memory: object,
    link: object,
    slow_down: Mapping[str, Any] | None,
    dies_at: Mapping[str, int] | None,
    matmul_share: float,
    seed: int,
    common: Mapping[str, Any],
) -> tuple[Device, ...]:
    """Returns the devices; see `hetkit.devices.fleet.emulate` for the arguments.

    ``common`` holds the fields of `Emulation` that all devices share. Each device's jitter has a
    seed of its own, ``seed`` plus its place. The keys are new in every call, so two fleets never
    claim the same device.

    Raises:
        DeviceError: An argument is out of its range or names no device of the fleet.
    """
    paces = relative_paces(places, pace)
    memories = memory_sizes(places, memory)
    intra, inter = parse_links(link)
    slow_downs = _per_place(places, slow_down, "slow_down")
    deaths = _per_place(places, dies_at, "dies_at")
    batch = uuid.uuid4().hex[:12]
    return tuple(
        Device(
            name=place.name,
            kind="cpu",
            index=index,
            key=f"emulated:{batch}:{index}",
            host=place.host,
            spec=place.spec,
            memory_bytes=memories[index],
            emulation=Emulation(
                pace=paces[index],
                amp_pace=amp_pace(place.spec, matmul_share),
                intra_link=intra,
                inter_link=inter,
                memory_bytes=memories[index],
                seed=seed + index,
                slow_downs=_slow_downs(slow_downs[index]),
                dies_at_step=_step(deaths[index]),
                **common,
            ),
        )
        for index, place in enumerate(places)
    )


def relative_paces(places: Sequence[Place], pace: Mapping[str, float] | None) -> tuple[float, ...]:
    """Returns each device's pace: as given, or from the catalogue (see the module's head).

    Raises:
        DeviceError: A pace is not above 0, or a name is neither given nor in the catalogue.
    """
    if pace is not None:
        given = _per_place(places, pace, "pace")
        for place, value in zip(places, given, strict=True):
            if value is None:
                _published(place)
        return tuple(1.0 if p is None else positive(p, name="pace") for p in given)
    strengths = [_strength(place) for place in places]
    slowest = min(strengths)
    return tuple(strength / slowest for strength in strengths)


def memory_sizes(places: Sequence[Place], memory: object) -> tuple[int | None, ...]:
    """Returns each device's memory in bytes: as given, or from the catalogue; None: unlimited.

    Raises:
        DeviceError: A size cannot be read, or a name is not in the fleet.
    """
    if memory is None or isinstance(memory, Mapping):
        given = _per_place(places, memory, "memory")
    else:
        given = (memory,) * len(places)
    published = (place.spec.memory_bytes if place.spec else None for place in places)
    return tuple(
        size if value is None else parse_memory(value)
        for value, size in zip(given, published, strict=True)
    )


def amp_pace(spec: DeviceSpec | None, matmul_share: float) -> dict[str, float]:
    """Returns precision to speed-up over float32, for the precisions that the device has.

    bf16 needs compute capability 8.0 (older cards only imitate it, more slowly). A CPU computes
    bf16 correctly, and no faster as far as hetkit knows. A name without figures has neither.

    Raises:
        DeviceError: ``matmul_share`` is not from 0 to 1.
    """
    share = at_least_0(matmul_share, name="matmul_share")
    if share > 1:
        raise DeviceError(f"matmul_share must be from 0 to 1, not {matmul_share!r}.")
    if spec is None:
        return {}
    if spec.vendor == "cpu":
        return {"bf16": 1.0}
    peaks = {"bf16": spec.bf16_flops, "fp16": spec.fp16_flops}
    return {
        precision: 1 / ((1 - share) + share * spec.fp32_flops / peak)
        for precision, peak in peaks.items()
        if peak and spec.fp32_flops
    }


def _strength(place: Place) -> float:
    spec = _published(place)
    if spec.fp32_flops is None or spec.memory_bytes_per_s is None:
        raise DeviceError(
            f"no speed is published for {place.name!r}: give the relative speeds, as in "
            f"pace={{{place.name!r}: 1.0}}."
        )
    return math.sqrt(spec.fp32_flops * spec.memory_bytes_per_s)


def _published(place: Place) -> DeviceSpec:
    """Returns the place's figures, which the catalogue has to have."""
    try:
        return find_spec(place.name)
    except DeviceError as error:
        raise DeviceError(
            f"{error} A device of your own needs its speed: pace={{{place.name!r}: 1.0}}."
        ) from error


def _per_place(places: Sequence[Place], values: object, argument: str) -> tuple[Any, ...]:
    """Returns each device's entry of a mapping by label (which wins) or name, or None."""
    if values is None:
        return (None,) * len(places)
    if not isinstance(values, Mapping):
        raise DeviceError(f"{argument} must be a mapping of device names, not {values!r}.")
    given = {_word(key): value for key, value in values.items()}
    known = {_word(word) for place in places for word in (place.label, place.name)}
    for key in values:
        if _word(key) not in known:
            raise DeviceError(f"{argument} names {key!r}; the fleet has {_names(places)}.")
    return tuple(given.get(_word(place.label), given.get(_word(place.name))) for place in places)


def _word(key: object) -> str:
    name, hash_sign, index = str(key).partition("#")
    return fold(name) + hash_sign + index.strip()


def _names(places: Iterable[Place]) -> str:
    names = dict.fromkeys(place.name for place in places)
    return ", ".join([*names, *(place.label for place in places)])


def _slow_downs(value: object) -> tuple[SlowDown, ...]:
    if value is None:
        return ()
    changes = (value,) if isinstance(value, SlowDown) else value
    if not isinstance(changes, Sequence) or not all(isinstance(c, SlowDown) for c in changes):
        raise DeviceError(f"slow_down takes hk.SlowDown(at_s=…, factor=…), not {value!r}.")
    return tuple(sorted(changes, key=lambda change: change.at_s))


def _step(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DeviceError(f"dies_at takes a step of at least 0, not {value!r}.")
    return value
