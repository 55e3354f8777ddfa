"""Hierarchy: sums inside islands of fast links first, so that the slow links carry little.

Ranks on one host, say, form an island. The gradient is summed inside each; one rank of each, its
leader, exchanges that sum with the other leaders, by the codec; and what comes out is spread
inside::

    island A   0 ─┐                     ┌─▶ 0
               1 ─┼─ sum ▶ 0 ══╗    ╔══▶ 0 ─┤
               2 ─┘            codec         └─▶ 1, 2
    island B   3 ─── sum ▶ 3 ══╝    ╚══▶ 3 ───▶ 4
               4 ─┘

A flat ring over both is as slow as its slowest hop, and its every rank's traffic goes at that pace;
here the slow link carries one exchange of as many ranks as there are islands. Inside, the gradient
travels as it is, so the codec's error arises once, not once a rank. All ranks end bit-equal: the
leaders by the codec, the others since they get their leader's very bytes.

The whole of it is stamped as one collective, the same number on every rank. What a leader's codec
computes counts as if it came first: codec time on the leader, for which the others wait::

    leader   codec██├─ sum ─ exchange ─ spread ─┤
    others   wait   ├─ transfer ────────────────┤
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hetkit.devices.device import Device
from hetkit.planning.exchange_time import ring_bytes
from hetkit.planning.islands import common_backend
from hetkit.worker.codecs.bucket import Bucket, Piece
from hetkit.worker.codecs.codec import Codec, Wire
from hetkit.worker.emulated_link import link_of
from hetkit.worker.wire import GroupWire

Islands = Sequence[tuple[int, ...]]


class Hierarchical(Codec):
    """A codec between islands; inside them, plain sums.

    Args:
        codec: Used between the leaders.
        inside: Connects the ranks of this rank's island; None for one alone.
        between: Connects the leaders; None on the others.
        islands: The ranks of each island, its leader first.
        leader: The place of this island's leader in ``inside``.
    """

    def __init__(
        self,
        codec: Codec,
        inside: GroupWire | None,
        between: GroupWire | None,
        islands: Islands,
        leader: int,
    ) -> None:
        self.name = codec.name
        self.feeds_back = codec.feeds_back
        self._codec = codec
        self._inside = inside
        self._between = between
        self._leaders = len(islands)
        self._leader = leader

    def exchange(self, bucket: Bucket, wire: Wire) -> None:
        """Sums inside, exchanges between the leaders, spreads inside."""
        start = time.monotonic()
        if self._inside is not None:
            self._inside.all_reduce(bucket.flat)
        codec_s = 0.0 if self._between is None else self._exchange_outside(bucket, self._between)
        if self._inside is not None:
            self._inside.broadcast(bucket.flat, source=self._leader)
            self._inside.collectives.clear()
        wire.stamp(start + codec_s)

    def _exchange_outside(self, bucket: Bucket, between: GroupWire) -> float:
        """Exchanges with the other leaders; returns the seconds that no collective took."""
        start = time.monotonic()
        if not bucket.flat.is_cuda or between.carries_cuda:
            self._codec.exchange(bucket, between)
        else:
            host = Bucket(bucket.flat.cpu(), bucket.pieces)
            self._codec.exchange(host, between)
            bucket.flat.copy_(host.flat)
        on_wire_s = sum(end - begin for begin, end in between.collectives)
        between.collectives.clear()
        return time.monotonic() - start - on_wire_s

    def settle(self, good: bool) -> None:
        """Settles the leader's codec; the others' keep nothing."""
        self._codec.settle(good)

    def state_dict(self) -> dict[str, Any]:
        """Returns the leader's codec's state."""
        return self._codec.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the codec's state."""
        self._codec.load_state_dict(state)

    def residual_norm(self) -> float | None:
        """Returns the norm of what waits in this rank's codec."""
        return self._codec.residual_norm()

    def wire_bytes(self, pieces: Sequence[Piece], element_bytes: int, world_size: int) -> float:
        """A ring and a spread inside, which a rank passes on in part; the codec's on a leader."""
        raw_bytes = sum(piece.numel for piece in pieces) * element_bytes
        sent_bytes = 0.0
        if self._inside is not None:
            n = self._inside.world_size
            sent_bytes += ring_bytes(n, raw_bytes) + (n - 1) / n * raw_bytes
        if self._between is not None:
            sent_bytes += self._codec.wire_bytes(pieces, element_bytes, self._leaders)
        return sent_bytes


class Archipelago:
    """The process groups of islands; made when they are first used, and kept for the next time.

    Args:
        devices: The fleet, in rank order.
        rank: This rank.
        device: Where the model lives.
    """

    def __init__(self, devices: Sequence[Device], rank: int) -> None:
        self._devices = devices
        self._rank = rank
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def over(self, codec: Callable[[], Codec], islands: Islands) -> Codec:
        """Returns the codec between ``islands``; all ranks must call it, with the same ones."""
        if not islands:
            return codec()
        leaders = tuple(island[0] for island in islands)
        wires = {ranks: self._wire(ranks) for ranks in (*islands, leaders)}
        mine = next(island for island in islands if self._rank in island)
        between = wires[leaders] if self._rank in leaders else None
        leader = sorted(mine).index(mine[0])  # torch sorts a group's ranks
        return Hierarchical(codec(), wires[mine], between, islands, leader)

    def _wire(self, ranks: tuple[int, ...]) -> GroupWire | None:
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:  # a group is made by all ranks, also by those outside it
            made = dist.new_group(list(ranks), backend=self._backend(ranks))
            self._groups[ranks] = made if self._rank in ranks else None
        group = self._groups[ranks]
        if group is None:
            return None
        members = [self._devices[rank] for rank in ranks]
        return GroupWire(group, link_of(members, self._devices[self._rank]))

    def _backend(self, ranks: Sequence[int]) -> str:
        best = common_backend([self._devices[rank] for rank in ranks])
        return best if dist.is_nccl_available() else "gloo"
