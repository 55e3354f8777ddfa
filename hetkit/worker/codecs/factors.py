"""PowerSGD: a matrix travels as the product of two thin ones.

One step of subspace iteration [1]_ from the last step's Q, with M_i a rank's gradient plus what
waits there::

    P = Σ M_i·Q        all-reduce, rows × r        P̂ = P orthonormalised, on every rank alike
    Qᵀ = Σ P̂ᵀ·M_i      all-reduce, r × columns     Σ M_i ≈ P̂·Qᵀ
    what waits: M_i − P̂·P̂ᵀ·M_i

P̂·P̂ᵀ is a projection, so what waits of the sum is no more than was given, ‖Σ M_i − P̂Qᵀ‖ ≤ ‖Σ M_i‖,
and exactly what has not arrived; at full rank nothing is left but rounding.

torch's own hook keeps its state by bucket and cannot be driven from another thread; this one keeps
it by parameter name. P is made orthonormal in float64 by sums in a fixed order, and decoded element
by element: a matrix product or a QR may round differently on unlike devices, and replicas drift.

.. [1] T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: practical low-rank gradient compression
   for distributed optimization", NeurIPS 2019.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetkit.compression import PowerSGD
from hetkit.planning.codec_bytes import matrix, wire_bytes
from hetkit.worker.codecs.bucket import Bucket, Piece
from hetkit.worker.codecs.codec import Codec, Wire
from hetkit.worker.codecs.feedback import Feedback
from hetkit.worker.codecs.packing import choose

_BLOCK = 64
"""Rows that are multiplied at a time."""


class Factors(Codec):
    """PowerSGD with error feedback.

    Args:
        spec: Its parameters.

    Example:
        >>> Factors(PowerSGD(4)).name
        'powersgd'
    """

    feeds_back = True

    def __init__(self, spec: PowerSGD) -> None:
        self.name = spec.name
        self._spec = spec
        self._feedback = Feedback()
        self._starts: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}

    def exchange(self, bucket: Bucket, wire: Wire) -> None:
        """Sums P and what is not compressed, then Q."""
        flat = bucket.flat
        if wire.world_size == 1 or flat.numel() == 0:
            return
        chosen, raw = choose(bucket, self._spec)
        if not chosen.elements:
            wire.all_reduce(flat)
            return
        wide = torch.promote_types(flat.dtype, torch.float32)
        matrices = [self._matrix(bucket, piece, wide) for piece in chosen.pieces]
        starts = [self._start(p.name, m) for p, m in zip(chosen.pieces, matrices, strict=True)]
        shapes = [(len(m), len(q)) for m, q in zip(matrices, starts, strict=True)]
        lefts, first = _room(shapes, raw.elements + 1, starts[0])
        rights, second = _room([tuple(q.shape) for q in starts], 0, starts[0])
        rest = first[len(first) - raw.elements - 1 :]
        raw.pack(flat, rest)
        rest[-1] = flat.amax().to(wide) * 0 + flat.amin().to(wide) * 0  # NaN if one is not finite
        for m, q, p in zip(matrices, starts, lefts, strict=True):
            torch.mm(m, q.t(), out=p)
        wire.all_reduce(first)
        for piece, m, p, q in zip(chosen.pieces, matrices, lefts, rights, strict=True):
            p.copy_(orthonormal(p))
            torch.mm(p.t(), m, out=q)
            torch.addmm(m, p, q, alpha=-1, out=self._feedback.room(piece.name, m))
        wire.all_reduce(second)
        for piece, p, q in zip(chosen.pieces, lefts, rights, strict=True):
            _multiply(p, q, bucket.view(piece).view(len(p), -1))
            self._pending[piece.name] = q.clone()
        raw.unpack(rest, flat)
        flat[:1] += rest[-1].to(flat.dtype)

    def settle(self, good: bool) -> None:
        """Keeps the step's residuals and where the next one starts, or drops them."""
        self._feedback.settle(good)
        if good:
            self._starts |= self._pending
        self._pending = {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and the starts, by parameter name."""
        starts = {name: start.detach().cpu().clone() for name, start in self._starts.items()}
        return {"residuals": self._feedback.state_dict(), "starts": starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes residuals and starts."""
        self._feedback.load_state_dict(state.get("residuals", {}))
        self._starts = {name: each.clone() for name, each in state.get("starts", {}).items()}
        self._pending = {}

    def residual_norm(self) -> float | None:
        """The norm of what waits on this rank."""
        return self._feedback.norm()

    def wire_bytes(self, pieces: Sequence[Piece], element_bytes: int, world_size: int) -> float:
        """2(n−1)/n of the factors and of what is not compressed."""
        return wire_bytes(self._spec, [p.shape for p in pieces], element_bytes, world_size)

    def _matrix(self, bucket: Bucket, piece: Piece, wide: torch.dtype) -> torch.Tensor:
        values = bucket.view(piece).to(wide)  # the bucket's own elements where that is its type
        self._feedback.add(piece.name, values)
        return values.view(matrix(piece.shape))

    def _start(self, name: str, m: torch.Tensor) -> torch.Tensor:
        """Returns Qᵀ to begin with: the last step's, each row scaled, or a random one."""
        rows, columns = m.shape
        shape = (min(self._spec.rank, rows, columns), columns)
        last = self._starts.get(name)
        last = torch.zeros(shape) if last is None or last.shape != shape else last
        # |M·q| stays in range so, and a row that found nothing begins anew.
        last = last.to(m)
        largest = last.abs().amax(1, keepdim=True)
        if not bool((largest > 0).all()):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            last = torch.where(largest > 0, last, torch.randn(shape, generator=generator).to(m))
            largest = last.abs().amax(1, keepdim=True)
        return last / largest / columns


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Returns an orthonormal basis of the span: modified Gram-Schmidt, in float64.

    A column that depends on those before it becomes zero. Only operations that every device rounds
    alike are used, and sums in a fixed order, so unlike devices get the same bits.

    Args:
        columns: A matrix, rows × r; it stays as it is.

    Example:
        >>> orthonormal(torch.tensor([[3.0, 1.0], [4.0, 1.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.800000011920929, -0.6000000238418579]]
    """
    basis = columns.double()
    # Halving by a power of two is exact, and squares stay in range.
    whole = basis.abs().amax(0)
    basis = basis / torch.where(whole > 0, whole, torch.ones_like(whole))
    for j in range(basis.shape[1]):
        column = basis[:, j]
        length = _sum(column * column).sqrt()
        # Below it, what is left of a column of largest element 1 is rounding.
        column.copy_(torch.where(length < 1e-10, column * 0, column / length))
        others = basis[:, j + 1 :]
        shares = _sum(column.unsqueeze(1) * others)
        others -= column.unsqueeze(1) * shares
    return basis.to(columns.dtype)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sums over the first dimension, in pairs: the same order on every device."""
    while len(values) > 1:
        half = len(values) // 2
        head = values[:half] + values[half : 2 * half]
        values = torch.cat([head, values[2 * half :]]) if len(values) % 2 else head
    return values[0]


def _multiply(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Writes P·Qᵀ, given P and Qᵀ, by elementwise operations, which every device rounds alike."""
    for top in range(0, len(p), _BLOCK):  # a block stays in the cache while it is added up
        left = p[top : top + _BLOCK]
        total = left[:, :1] * q[0]
        for j in range(1, len(q)):
            total += left[:, j : j + 1] * q[j]
        out[top : top + _BLOCK].copy_(total)


def _room(
    shapes: Sequence[tuple[int, ...]], more: int, like: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns matrices of these shapes that lie in one flat tensor, and that tensor."""
    sizes = [rows * columns for rows, columns in shapes]
    flat = torch.empty(sum(sizes) + more, dtype=like.dtype, device=like.device)
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], flat
