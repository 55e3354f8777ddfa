"""The link between emulated devices: first in, first out, held by whoever waits for a transfer.

::

    link   ──b0──▶──b1──▶      ──b2──▶        latency + bytes / rate each, begun when the last
           ↑  ↑                ↑              rank has come and the one before is through
           0  1 arrive         2
"""

import time
from collections.abc import Sequence

from hetkit.devices.device import Device, Link
from hetkit.planning.exchange_time import ring_bytes, slowest_link


class EmulatedLink:
    """The link between the emulated devices: one message at a time, latency + bytes / rate.

    Args:
        link: The slowest link on the ring of these ranks.
        world_size: Ranks that it connects.
        time_scale: Wall seconds per device second.

    Example:
        >>> link = EmulatedLink(Link(bytes_per_s=1e6), world_size=2, time_scale=1.0)
        >>> began = time.monotonic()
        >>> link.occupy(began, 10_000)
        >>> time.monotonic() - began >= 0.01
        True
    """

    def __init__(self, link: Link, world_size: int, time_scale: float) -> None:
        self._link = link
        self._world_size = world_size
        self._time_scale = time_scale
        self._free_at = 0.0

    def occupy(self, arrival: float, raw_bytes: int) -> None:
        """Holds until a ring all-reduce of ``raw_bytes`` that began at ``arrival`` has passed."""
        self._hold(arrival, 2 * (self._world_size - 1), ring_bytes(self._world_size, raw_bytes))

    def occupy_half(self, arrival: float, whole_bytes: int) -> None:
        """Holds as an all-to-all or an all-gather does: each is one half of a ring all-reduce.

        Args:
            arrival: When the last rank came.
            whole_bytes: What one rank has before an all-to-all, or after an all-gather.
        """
        self._hold(arrival, self._world_size - 1, ring_bytes(self._world_size, whole_bytes) / 2)

    def occupy_spread(self, arrival: float, raw_bytes: int) -> None:
        """Holds as a broadcast does that goes from rank to rank, in pieces."""
        self._hold(arrival, self._world_size - 1, raw_bytes if self._world_size > 1 else 0)

    def _hold(self, arrival: float, hops: int, sent_bytes: float) -> None:
        begin = max(arrival, self._free_at)
        seconds = hops * self._link.latency_s + sent_bytes / self._link.bytes_per_s
        self._free_at = begin + seconds * self._time_scale
        rest = self._free_at - time.monotonic()
        if rest > 0:
            time.sleep(rest)


def link_of(devices: Sequence[Device], me: Device) -> EmulatedLink | None:
    """Returns this rank's emulated link in a ring over ``devices``; None where links are real."""
    slowest = slowest_link(devices)
    if me.emulation is None or slowest is None:
        return None
    return EmulatedLink(slowest, len(devices), me.emulation.time_scale)
