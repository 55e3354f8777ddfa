"""How long the exchange of gradients takes, from the bytes and the slowest link.

A ring all-reduce over *n* ranks cuts the gradient into *n* pieces. In n − 1 rounds each rank sends
one piece on and adds what it receives; in n − 1 further rounds the finished pieces go round::

    0 ─▶ 1 ─▶ 2 ─▶ 0      2(n − 1) rounds, one piece of bytes/n per rank and round

    bytes per rank = 2(n − 1)/n · bytes               (for large n: twice the gradient, whatever n)
    seconds        = 2(n − 1)·latency + bytes per rank / rate

In every round all links work at once, so the slowest sets the pace. This is the α–β cost of the
bandwidth-optimal all-reduce [1]_; traffic grows with n in total and hardly at all per rank, and
what does grow with n is the latency.

Between hosts links are slower than inside one, and a flat ring over both is as slow as its slowest
hop. Over *islands* of fast links, the gradient is summed inside each, one rank of each exchanges
the sum with the others, and the result is spread inside (`hetkit.worker.hierarchy`)::

    seconds = ring inside + (codec's) exchange of the leaders + spread inside

.. [1] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
   workstations", J. Parallel Distrib. Comput. 69 (2009).
"""

from collections.abc import Sequence

from hetkit.devices.device import Device, Link
from hetkit.errors import PlanError

BUCKET_BYTES = 25 * 2**20
"""PyTorch's usual size of a gradient bucket."""


def ring_bytes(world_size: int, raw_bytes: float) -> float:
    """Returns what each rank sends in a ring all-reduce: 2(n − 1)/n · ``raw_bytes``.

    Args:
        world_size: Ranks in the ring, at least 1; one alone sends nothing.
        raw_bytes: Size of the gradient as it travels (after the codec), at least 0.

    Raises:
        PlanError: A value is out of its range.

    Example:
        >>> ring_bytes(4, 100.0)
        150.0
    """
    if world_size < 1 or not raw_bytes >= 0:
        raise PlanError(f"a ring needs at least 1 rank and 0 bytes: {world_size}, {raw_bytes}.")
    return 2 * (world_size - 1) / world_size * raw_bytes


def ring_seconds(world_size: int, wire_bytes: float, link: Link) -> float:
    """Returns how long a ring all-reduce takes: 2(n − 1)·latency + ``wire_bytes``/rate.

    Args:
        world_size: Ranks in the ring, at least 1; one alone takes no time.
        wire_bytes: What each rank sends, see `ring_bytes`; at least 0.
        link: The slowest link of the ring.

    Raises:
        PlanError: A value is out of its range.

    Example:
        >>> ring_seconds(2, 1e9, Link(latency_s=0.001, bytes_per_s=2e9))
        0.502
    """
    if world_size < 1 or not wire_bytes >= 0:
        raise PlanError(f"a ring needs at least 1 rank and 0 bytes: {world_size}, {wire_bytes}.")
    if world_size == 1:
        return 0.0
    return 2 * (world_size - 1) * link.latency_s + wire_bytes / link.bytes_per_s


def spread_seconds(world_size: int, raw_bytes: float, link: Link) -> float:
    """Returns how long a broadcast takes that goes from rank to rank in pieces.

    (n − 1)·latency + ``raw_bytes``/rate: the pieces follow each other, so the rate counts once.

    Example:
        >>> spread_seconds(3, 1e9, Link(latency_s=0.001, bytes_per_s=2e9))
        0.502
    """
    if world_size == 1:
        return 0.0
    return (world_size - 1) * link.latency_s + raw_bytes / link.bytes_per_s


def island_seconds(
    devices: Sequence[Device],
    islands: Sequence[Sequence[int]],
    raw_bytes: float,
    between_bytes: float | None = None,
) -> float | None:
    """Returns how long an exchange over islands takes: sum inside, between leaders, spread inside.

    Each of the three waits for the slowest island::

        max_i ring(n_i, raw)  +  ring of the leaders  +  max_i spread(n_i, raw)

    Args:
        devices: The fleet, in rank order.
        islands: The ranks of each island, its leader first.
        raw_bytes: Size of the gradient, which travels inside as it is.
        between_bytes: What each leader sends, after the codec. Default: as it is, in a ring.

    Returns:
        Seconds; None where the links are not known.

    Example:
        >>> from hetkit.devices.device import Emulation
        >>> links = Emulation(intra_link=Link(bytes_per_s=8e9), inter_link=Link(bytes_per_s=1e9))
        >>> fleet = [
        ...     Device(name="T4", kind="cpu", index=i, key="", host=f"h{i // 2}", emulation=links)
        ...     for i in range(4)
        ... ]
        >>> round(island_seconds(fleet, [(0, 1), (2, 3)], 1e9), 3)  # 1/8 + 1 + 1/8
        1.25
    """
    leaders = [devices[island[0]] for island in islands]
    outside = slowest_link(leaders)
    if outside is None:
        return None
    n = len(leaders)
    sent_bytes = ring_bytes(n, raw_bytes) if between_bytes is None else between_bytes
    sums, spreads = [0.0], [0.0]
    for island in islands:
        inside = slowest_link([devices[rank] for rank in island])
        if inside is None:
            return None
        size = len(island)
        sums.append(ring_seconds(size, ring_bytes(size, raw_bytes), inside))
        spreads.append(spread_seconds(size, raw_bytes, inside))
    return max(sums) + ring_seconds(n, sent_bytes, outside) + max(spreads)


def exchange_seconds(
    devices: Sequence[Device],
    raw_bytes: float,
    *,
    islands: Sequence[Sequence[int]] = (),
    sent_bytes: float | None = None,
) -> float | None:
    """Returns how long one exchange takes: in a flat ring over all devices, or over islands.

    Args:
        devices: The fleet, in rank order.
        raw_bytes: Size of the gradient.
        islands: The ranks of each island, its leader first. Default: none, a flat ring.
        sent_bytes: What a rank (with islands, a leader to the others) sends, after the codec.
            Default: the gradient as it is, in a ring.

    Returns:
        Seconds; None where the links are not known.

    Example:
        >>> import hetkit as hk
        >>> fleet = hk.emulate("4xV100", link="1GB/s").devices
        >>> exchange_seconds(fleet, 1e9), exchange_seconds(fleet, 1e9, sent_bytes=0.375e9)
        (1.5, 0.375)
    """
    if islands:
        return island_seconds(devices, islands, raw_bytes, sent_bytes)
    slowest, n = slowest_link(devices), len(devices)
    if slowest is None:
        return None
    return ring_seconds(n, ring_bytes(n, raw_bytes) if sent_bytes is None else sent_bytes, slowest)


def slowest_link(devices: Sequence[Device]) -> Link | None:
    """Returns the link that sets the pace of a ring over ``devices``.

    The ring goes through them in their order, and back to the first: from one device to the next
    of the same host over the links inside, to one of another host over those between. Latency and
    rate may come from different hops: each round of the ring waits for the worst of both.

    Returns:
        None where it is not known: real devices state no link, it has to be measured.

    Raises:
        PlanError: There are no devices.

    Example:
        >>> from hetkit.devices.device import Emulation
        >>> def emulated(index: int, link: Link) -> Device:
        ...     emulation = Emulation(intra_link=link)
        ...     return Device(name="T4", kind="cpu", index=index, key="", emulation=emulation)
        >>> fleet = [emulated(0, Link(bytes_per_s=2e9)), emulated(1, Link(bytes_per_s=1e9))]
        >>> slowest_link(fleet).bytes_per_s
        1000000000.0
    """
    if not devices:
        raise PlanError("no devices: give at least one.")
    links = []
    for here, there in zip(devices, [*devices[1:], devices[0]], strict=True):
        for emulation in (here.emulation, there.emulation):
            if emulation is None:
                return None
            inside = here.host == there.host
            links.append(emulation.intra_link if inside else emulation.inter_link)
    return Link(
        latency_s=max(link.latency_s for link in links),
        bytes_per_s=min(link.bytes_per_s for link in links),
    )
