"""Integers of 8 and of 4 bits, with one float32 scale for each block of elements.

A block of x with largest magnitude m is sent as q = round(x/s) with s = m/L, L = 127 or 7. Ranks
send once and the owner of a shard once more, so with blocks m₁ … m_W and m of the sum as added up,

    |error| ≤ (m₁ + … + m_W + m) / 2L      nearest (int8): half a step each
    |error| ≤ (m₁ + … + m_W + m) / L       stochastic (int4): a step each, and 0 on average

beside float32's own rounding and 1e-36 for each rank (the smallest scale). Nothing waits: 8 bits
are close enough, and rounding up with the probability of the remainder is right on average.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hetkit.compression import Int4, Int8
from hetkit.planning.codec_bytes import code_parts
from hetkit.worker.codecs.halves import TwoHalves, Work

_SMALLEST_SCALE = 1e-36
"""Its inverse is still a float32."""

_POOL = 2**20


class Integers8(TwoHalves):
    """int8, rounded to the nearest.

    Args:
        spec: Its parameters.

    Example:
        >>> Integers8(Int8()).name
        'int8'
    """

    levels = 127

    def __init__(self, spec: Int8 | Int4) -> None:
        super().__init__(spec)

    def _code_types(
        self, compressed: int, dtype: torch.dtype, world_size: int
    ) -> list[tuple[int, torch.dtype]]:
        scales, codes = code_parts(self._spec, compressed, dtype.itemsize, world_size)
        return [(scales[0], torch.float32), (codes[0], self._code_type)]

    _code_type = torch.int8

    def _encode_mine(self, work: Work, rank: int) -> None:
        self._encode(work.values, work.out.parts[1], work.out.parts[2], rank)

    def _add_up(self, work: Work, rank: int) -> None:
        _, scales, codes = work.came.parts
        self._decode(scales, codes, work.values)
        torch.sum(work.values, 0, keepdim=True, out=work.shard)
        self._encode(work.shard, work.mine.parts[1], work.mine.parts[2], rank)

    def _decode_all(self, work: Work) -> None:
        self._decode(work.came.parts[1], work.came.parts[2], work.values)

    def _encode(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, rank: int
    ) -> None:
        largest = torch.maximum(values.amax(-1), values.amin(-1).neg_())
        scales.copy_(largest.div_(self.levels).clamp_(min=_SMALLEST_SCALE))
        # NaN and infinity pass into the scale, and make NaN of the whole block on all ranks.
        values.mul_(scales.to(values.dtype).reciprocal().unsqueeze(-1))
        self._round(values, codes, rank)

    def _round(self, values: torch.Tensor, codes: torch.Tensor, rank: int) -> None:
        codes.copy_(values.round_().view(len(values), -1))

    def _decode(self, scales: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
        values.view(len(values), -1).copy_(codes)
        values.mul_(scales.unsqueeze(-1))


class Integers4(Integers8):
    """4 bits, two in a byte, rounded stochastically from a pool of noise.

    The noise is fixed by step, bucket and rank, so a run can be repeated.

    Args:
        spec: Its parameters.

    Example:
        >>> Integers4(Int4()).name
        'int4'
    """

    levels = 7
    _code_type = torch.uint8

    def __init__(self, spec: Int4) -> None:
        super().__init__(spec)
        self._pool = torch.empty(0)
        self._step = 0
        self._draws = 0

    def settle(self, good: bool) -> None:
        """Goes on to the next step's noise."""
        super().settle(good)
        self._step, self._draws = self._step + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The number of steps: it fixes the noise."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with that step's noise."""
        self._step, self._draws = int(state.get("step", 0)), 0

    def _round(self, values: torch.Tensor, codes: torch.Tensor, rank: int) -> None:
        levels = values.add_(self._noise(values, rank)).floor_().clamp_(-self.levels, self.levels)
        half = values.shape[-1] // 2
        pairs = (levels[..., half:] + 8).mul_(16).add_(levels[..., :half]).add_(8)
        codes.copy_(pairs.view(len(values), -1))

    def _decode(self, scales: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
        half = values.shape[-1] // 2
        pairs = codes.reshape(*values.shape[:-1], half)
        values[..., :half].copy_(pairs & 15)
        values[..., half:].copy_(pairs >> 4)
        values.sub_(8).mul_(scales.unsqueeze(-1))

    def _noise(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        # Overlapping windows of one pool, one for each block, from a place of this draw's own.
        if (
            self._pool.device != values.device
            or self._pool.dtype != values.dtype
            or not (self._pool.numel())
        ):
            generator = torch.Generator().manual_seed(0)
            self._pool = torch.rand(_POOL, generator=generator).to(values)
        self._draws += 1
        ranks, blocks, length = values.shape
        stride = min(1009, (_POOL // 2) // max(1, ranks * blocks))
        room = _POOL - stride * ranks * blocks - length
        place = (self._step * 7_368_787 + self._draws * 15_485_863 + rank * 49_979_687) % room
        strides = (stride * blocks, stride, 1)
        return self._pool.as_strided((ranks, blocks, length), strides, place)
