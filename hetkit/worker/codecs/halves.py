"""Two halves: an all-reduce by hand, for codes that cannot be added on the way.

`hetkit.planning.codec_bytes` draws it: every rank sends its codes of shard j to rank j, which adds
them up, encodes the sum and sends it to all. All ranks decode the same bytes by the same
operations, element by element, and so end with the same bits, on unlike devices too. What is not
compressed travels in the same rows.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from hetkit.compression import Selective
from hetkit.planning.codec_bytes import cut_for, wire_bytes
from hetkit.worker.codecs.bucket import Bucket, Piece
from hetkit.worker.codecs.codec import Codec, Wire
from hetkit.worker.codecs.message import Message
from hetkit.worker.codecs.packing import Run, choose

Parts = Sequence[torch.Tensor]


class Work:
    """What one bucket's exchange needs, made once and used in every step.

    Args:
        bucket: The bucket, for its pieces, type and device.
        spec: The codec's parameters.
        code_types: ``(count, dtype)`` of what a row holds of the compressed elements.
        runs: What is compressed, and what is not.
        world_size: Ranks.

    Attributes:
        values: The compressed elements, (ranks, segments, length), in float32 or float64.
        shard: This rank's shard of the sum, (1, segments, length).
    """

    def __init__(
        self,
        bucket: Bucket,
        spec: Selective,
        code_types: Sequence[tuple[int, torch.dtype]],
        runs: tuple[Run, Run],
        world_size: int,
    ) -> None:
        self.compressed, self.raw = runs
        flat, cut = bucket.flat, cut_for(spec, self.compressed.elements, world_size)
        wide = torch.promote_types(flat.dtype, torch.float32)
        shape = (world_size, cut.count, cut.length)
        self.values = torch.zeros(shape, dtype=wide, device=flat.device)
        self.shard = torch.zeros(1, *shape[1:], dtype=wide, device=flat.device)
        width = -(-self.raw.elements // world_size)
        self._raw_values = torch.zeros(world_size, width, dtype=flat.dtype, device=flat.device)
        parts = [(width, flat.dtype), *code_types]
        self.out, self.came = (Message(world_size, parts, flat.device) for _ in range(2))
        self.mine = Message(1, parts, flat.device)

    @property
    def packed(self) -> torch.Tensor:
        """The compressed elements, one after the other."""
        return self.values.view(-1)

    def load(self, flat: torch.Tensor) -> None:
        """Takes the bucket's elements in."""
        self.compressed.pack(flat, self.packed)
        self.packed[self.compressed.elements :] = 0
        self.raw.pack(flat, self._raw_values.view(-1))
        self.out.parts[0].copy_(self._raw_values)

    def sum_raw(self) -> None:
        """Adds up what came of this rank's shard of the raw elements."""
        self.mine.parts[0].copy_(self.came.parts[0].sum(0, keepdim=True))

    def unload(self, flat: torch.Tensor) -> None:
        """Writes the sums to the bucket."""
        self.compressed.unpack(self.packed, flat)
        self._raw_values.copy_(self.came.parts[0])
        self.raw.unpack(self._raw_values.view(-1), flat)


class TwoHalves(Codec):
    """A codec whose codes are added up by the rank that owns their shard.

    Args:
        spec: Its parameters.
    """

    def __init__(self, spec: Selective) -> None:
        self.name = spec.name
        self._spec = spec
        self._works: dict[object, Work] = {}
        self._used: set[object] = set()

    def exchange(self, bucket: Bucket, wire: Wire) -> None:
        """Encodes, has every shard's owner add it up, and decodes the sums."""
        if wire.world_size == 1 or bucket.flat.numel() == 0:
            return
        work = self._work(bucket, wire.world_size)
        if work is None:
            wire.all_reduce(bucket.flat)
            return
        work.load(bucket.flat)
        self._encode_mine(work, wire.rank)
        wire.all_to_all(work.came.bytes, work.out.bytes)
        work.sum_raw()
        self._add_up(work, wire.rank)
        wire.all_gather(work.came.bytes, work.mine.bytes)
        self._decode_all(work)
        work.unload(bucket.flat)
        self._finish(work, bucket.flat)

    def settle(self, good: bool) -> None:
        """Lets go of what only buckets of an earlier layout needed."""
        if self._used:  # none in a step without an exchange
            self._works = {key: work for key, work in self._works.items() if key in self._used}
        self._used = set()

    def wire_bytes(self, pieces: Sequence[Piece], element_bytes: int, world_size: int) -> float:
        """2(n−1) rows, see `hetkit.planning.codec_bytes`."""
        return wire_bytes(self._spec, [p.shape for p in pieces], element_bytes, world_size)

    @abstractmethod
    def _code_types(
        self, compressed: int, dtype: torch.dtype, world_size: int
    ) -> list[tuple[int, torch.dtype]]:
        """Returns ``(count, dtype)`` of a row's parts."""

    @abstractmethod
    def _encode_mine(self, work: Work, rank: int) -> None:
        """Encodes ``work.values`` into ``work.out``."""

    @abstractmethod
    def _add_up(self, work: Work, rank: int) -> None:
        """Adds up this rank's shard from ``work.came`` and encodes the sum into ``work.mine``."""

    @abstractmethod
    def _decode_all(self, work: Work) -> None:
        """Decodes the sums in ``work.came`` into ``work.values``."""

    def _finish(self, work: Work, flat: torch.Tensor) -> None:
        """Marks the bucket where a codec has to."""
        return

    def _work(self, bucket: Bucket, world_size: int) -> Work | None:
        flat = bucket.flat
        key = (bucket.pieces, flat.dtype, flat.device, world_size)
        self._used.add(key)
        if key not in self._works:
            runs = choose(bucket, self._spec)
            if not runs[0].elements:
                return None
            types = self._code_types(runs[0].elements, flat.dtype, world_size)
            self._works[key] = Work(bucket, self._spec, types, runs, world_size)
        return self._works[key]
