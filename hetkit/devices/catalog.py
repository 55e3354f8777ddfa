"""The catalogue: published figures of common cards, each with its source.

Peak figures are a poor prior for speed (MI300X : A100 is 4.2 by peak, 2.5 measured), so hetkit
measures the cards one has and uses this table only for those one does not have.
"""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from hetkit.devices.device import DeviceSpec
from hetkit.errors import DeviceError

# Dense peaks in TFLOPS, memory in GB as printed on the card (2³⁰ bytes), links and memory bandwidth
# in 10⁹ bytes/s, links with both directions summed.
#   *    from memory, not verified         –   the card has no such mode, or nobody published it
#   n/2  half of the module's figure: one of an MI250X's two dies (GCDs) is one device
# The first row of a family that claims the short alias ("A100") is its documented default: the
# socketed board with the smaller memory.
_TABLE = """
name          | also                   | arch   | GB    | GB/s   | fp32   | tf32  | fp16  | bf16  | link      | GB/s   | W
A100-SXM4-40  | A100, A100-40          | 8.0    | 40    | 1555   | 19.5   | 156   | 312   | 312   | NVLink3   | 600    | 400
A100-SXM4-80  | A100-80                | 8.0    | 80    | 2039*  | 19.5   | 156   | 312   | 312   | NVLink3   | 600    | 400
A100-PCIe-40  | A100-40-PCIe           | 8.0    | 40    | 1555   | 19.5   | 156   | 312   | 312   | PCIe4     | 62     | 250
A100-PCIe-80  | A100-80-PCIe           | 8.0    | 80    | 1940   | 19.5   | 156   | 312   | 312   | PCIe4     | 62     | 300
V100-SXM2-16  | V100, V100-16          | 7.0    | 16    | 900    | 15.7   | –     | 125   | –     | NVLink2   | 300    | 300
V100-SXM2-32  | V100-32                | 7.0    | 32    | 900    | 15.7   | –     | 125   | –     | NVLink2   | 300    | 300
V100-PCIe-16  | V100-16-PCIe           | 7.0    | 16    | 900*   | 14     | –     | 112   | –     | PCIe3     | 31.5*  | 250*
V100-PCIe-32  | V100-32-PCIe           | 7.0    | 32    | 900*   | 14     | –     | 112   | –     | PCIe3     | 31.5*  | 250*
T4            |                        | 7.5    | 16    | 320    | 8.1    | –     | 65    | –     | PCIe3     | 31.5*  | 70
A10           |                        | 8.6*   | 24    | 600    | 31.2   | 62.5* | 125   | 125   | PCIe4     | 62     | 150*
L4            |                        | 8.9    | 24    | 300    | 30.3   | 60    | 121*  | 121*  | PCIe4     | 62     | 72
H100-SXM5     | H100, H100-80-HBM3     | 9.0    | 80    | 3350   | 67     | 494.5 | 989   | 989   | NVLink4   | 900    | 700
H100-PCIe     |                        | 9.0    | 80    | 2000   | 51     | 378   | 756   | 756   | PCIe5     | 126    | 350*
H200-SXM      | H200                   | 9.0    | 141   | 4800   | 67     | 494.5 | 989   | 989   | NVLink4   | 900    | 700
RTX 3090      | 3090                   | 8.6    | 24    | 936    | 35.6   | 35.6* | 71*   | 71*   | bridge    | 112.5* | 350
RTX 4090      | 4090                   | 8.9    | 24    | 1008   | 82.6   | 82.6  | 165.2 | 165.2 | PCIe4     | 62     | 450*
RTX A6000     | A6000                  | 8.6*   | 48    | 768    | 38.7   | 77.4* | 154.8*| 154.8*| bridge    | 112.5* | 300
GTX 1080 Ti   | 1080 Ti                | 6.1*   | 11*   | 484*   | 11.34* | –     | –     | –     | PCIe3     | 31.5*  | 250*
MI250X        |                        | gfx90a*| 128/2 | 3280/2 | 47.9/2 | –     | 383/2 | 383/2 | xGMI      | 700/2  | –
MI300X        |                        | gfx942 | 192   | 5300   | 163.4  | 653.7 | 1307  | 1307  | xGMI      | 896    | 750
"""  # noqa: E501 - a table is read by its columns

_FIELDS = (
    ("architecture", 1.0),
    ("memory_bytes", 2.0**30),
    ("memory_bytes_per_s", 1e9),
    ("fp32_flops", 1e12),
    ("tf32_flops", 1e12),
    ("fp16_flops", 1e12),
    ("bf16_flops", 1e12),
    ("link", 1.0),
    ("link_bytes_per_s", 1e9),
    ("power_w", 1.0),
)
_TEXTS = ("architecture", "link")
_VERIFIED = "vendor datasheet, as tabulated by ml-engineering or Lightning's throughput tables"
_FROM_MEMORY = "from memory, not verified"
_HALVED = f"half of the module's figure (one of its two GCDs is a device); {_VERIFIED}"


@cache
def catalog() -> Mapping[str, DeviceSpec]:
    """Returns every known spec by its own name, in the table's order.

    Example:
        >>> from hetkit.devices.catalog import catalog
        >>> catalog()["T4"].fp16_flops
        65000000000000.0
    """
    specs = {cells[0]: _spec(cells) for cells in _rows()}
    specs["CPU"] = DeviceSpec(name="CPU", vendor="cpu")
    return MappingProxyType(specs)


def known_spec(name: str) -> DeviceSpec | None:
    """Returns the figures of a card by any of its names, or None when they are not known.

    Upper and lower case, spaces, hyphens, the maker's words (NVIDIA, GeForce, Tesla …) and the
    "GB" after a size make no difference, so a driver's name is found as well.

    Example:
        >>> from hetkit.devices.catalog import known_spec
        >>> known_spec("NVIDIA A100 80GB PCIe").name
        'A100-PCIe-80'
        >>> known_spec("RTX 3090 Ti") is None
        True
    """
    return _by_alias().get(fold(name))


def find_spec(name: str) -> DeviceSpec:
    """Returns the figures of a card by any of its names; see `known_spec`.

    Short names stand for the socketed board with the smaller memory: ``"A100"`` is
    A100-SXM4-40, ``"V100"`` is V100-SXM2-16, ``"H100"`` is H100-SXM5.

    Raises:
        DeviceError: The catalogue does not have it; the message lists the closest names.

    Example:
        >>> from hetkit.devices.catalog import find_spec
        >>> find_spec("v100 sxm2 32").memory_bytes == 32 * 2**30
        True
    """
    spec = known_spec(name)
    if spec is not None:
        return spec
    aliases = _by_alias()
    close = difflib.get_close_matches(fold(name), aliases, n=5, cutoff=0.5)
    hint = ", ".join(dict.fromkeys(aliases[alias].name for alias in close))
    raise DeviceError(
        f"the catalogue has no card {name!r}"
        + (f"; the closest are {hint}" if hint else "")
        + f". It has: {', '.join(catalog())}."
    )


def fold(name: str) -> str:
    """Returns what remains of a card's name once case, spaces and the maker's words are gone.

    Example:
        >>> from hetkit.devices.catalog import fold
        >>> fold("Tesla V100-SXM2-16GB")
        'v100sxm216'
    """
    words = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|radeon)\b", " ", name.lower())
    words = re.sub(r"(?<=[0-9])\s*gi?b\b", " ", words)
    return "".join(c for c in words if c.isalnum())


@cache
def _by_alias() -> Mapping[str, DeviceSpec]:
    aliases = {fold(name): spec for name, spec in catalog().items()}
    for name, also, *_ in _rows():
        aliases.update((fold(alias), catalog()[name]) for alias in also.split(",") if alias.strip())
    return MappingProxyType(aliases)


def _rows() -> list[list[str]]:
    _, *lines = _TABLE.strip().splitlines()
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def _spec(cells: list[str]) -> DeviceSpec:
    name, _, *printed = cells
    values: dict[str, str | float | None] = {}
    sources = {"*": _VERIFIED}
    for (field, unit), cell in zip(_FIELDS, printed, strict=True):
        if cell.endswith("*"):
            sources[field] = _FROM_MEMORY
        elif cell.endswith("/2"):
            sources[field] = _HALVED
        values[field] = cell.rstrip("*") if field in _TEXTS else _figure(cell, unit)
    memory = values.pop("memory_bytes")
    return DeviceSpec(
        name=name,
        vendor="amd" if name.startswith("MI") else "nvidia",
        memory_bytes=None if memory is None else int(memory),
        sources=sources,
        **values,  # type: ignore[arg-type]  # the keys are _FIELDS, the texts are _TEXTS
    )


def _figure(cell: str, unit: float) -> float | None:
    if cell == "–":
        return None
    number, _, divisor = cell.rstrip("*").partition("/")
    return float(number) * unit / float(divisor or 1)
