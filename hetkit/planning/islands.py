"""Islands: which ranks have fast links among them, and whether to sum inside those first.

Inside a host the links are fast, between hosts slow; and cards of one vendor speak its own library
(NCCL; RCCL goes by the same name), which those of another do not, so that both must meet over
gloo::

    host a   ┌ nvidia 0 ═ nvidia 1 ┐      ┌ amd 4 ═ amd 5 ┐   host b
             └ cpu 2 ═ cpu 3 ──────┴ gloo ┴───────────────┘

In a fleet that has one library for all, islands are the hosts; else the hosts' parts that have one.
"""

import math
from collections.abc import Sequence

from hetkit.compression import Custom, parse_compression
from hetkit.devices.device import Device
from hetkit.planning.codec_bytes import wire_bytes
from hetkit.planning.exchange_time import BUCKET_BYTES, exchange_seconds

Islands = tuple[tuple[int, ...], ...]


def common_backend(devices: Sequence[Device]) -> str:
    """Returns what carries tensors among ``devices``: ``"nccl"`` or ``"gloo"``.

    NCCL needs a card for each rank, all of one vendor. A card that the catalogue does not know is
    taken for one like the others.

    Example:
        >>> common_backend([Device(name="cpu", kind="cpu", index=0, key="cpu:0")])
        'gloo'
    """
    vendors = {device.spec.vendor for device in devices if device.spec is not None}
    cards = all(device.kind == "cuda" for device in devices)
    return "nccl" if cards and len(vendors) <= 1 else "gloo"


def natural_islands(devices: Sequence[Device]) -> Islands:
    """Returns the islands that a fleet has by itself, each in rank order; the first rank leads.

    Example:
        >>> a = Device(name="cpu", kind="cpu", index=0, key="cpu:0", host="a")
        >>> b = Device(name="cpu", kind="cpu", index=0, key="cpu:0", host="b")
        >>> natural_islands([a, b, a])
        ((0, 2), (1,))
    """
    apart = common_backend(devices) == "gloo"
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, device in enumerate(devices):
        vendor = device.spec.vendor if device.kind == "cuda" and device.spec is not None else ""
        key = (device.host, device.kind, vendor) if apart else (device.host,)
        groups.setdefault(key, []).append(rank)
    return tuple(map(tuple, groups.values()))


def islands_pay(devices: Sequence[Device], islands: Islands, compression: str = "none") -> bool:
    """Tells whether islands are faster than one flat exchange, for a bucket of the usual size.

    A codec that sends little speaks for the flat exchange: inside islands the gradient travels as
    it is. Where the links are not known, that there are islands is reason enough: inside one they
    are faster.

    Args:
        devices: The fleet, in rank order.
        islands: The ranks of each island, its leader first.
        compression: The codec's text. What a task's own sends is not known: taken as "none".
    """
    flat_bytes, between_bytes = (
        _sent_bytes(compression, ranks) for ranks in (len(devices), len(islands))
    )
    flat_s = exchange_seconds(devices, BUCKET_BYTES, sent_bytes=flat_bytes)
    by_islands_s = exchange_seconds(
        devices, BUCKET_BYTES, islands=islands, sent_bytes=between_bytes
    )
    return flat_s is None or by_islands_s is None or by_islands_s < flat_s


def _sent_bytes(compression: str, world_size: int) -> float:
    """Returns what a rank sends of a usual bucket, taken as one square matrix."""
    codec = parse_compression(compression)
    side = math.isqrt(BUCKET_BYTES // 4)
    known = "none" if isinstance(codec, Custom) else codec
    return wire_bytes(known, [(side, side)], 4, world_size)
