"""The training state on disk: written whole or not at all, read with ``weights_only=True``.

``torch.save`` rather than ``torch.distributed.checkpoint``: under DDP every rank holds the whole
state, so one file by rank 0 is the simplest thing that loads on any number of devices. What differs
between ranks (a codec's residuals) is sent to rank 0 and goes into the same file, as one block of
bytes for each rank, of which a rank later reads only its own::

    model · optimizer · place · …   │ rank 0's codec │ rank 1's codec │ …
"""

import copy
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORMAT = 1

CHUNK_BYTES = 64 * 2**20
"""How much of a rank's block travels at once: on NCCL it must pass through the card's memory."""


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` to ``path`` atomically: a temporary file beside it, synced, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any]:
    """Reads what `write_state` wrote, as tensors and plain data only.

    The ranks' blocks in ``"codec"`` stay in the file until they are looked at.

    Raises:
        ValueError: The file is of another format.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has checkpoint format {state.get('format')!r}, not {FORMAT}.")
    codec = state.pop("codec", None)
    return {**copy.deepcopy(state), "codec": codec}


def gather_states(state: dict[str, Any], device: torch.device) -> list[torch.Tensor] | None:
    """Sends each rank's state to rank 0; all ranks must call it.

    Args:
        state: This rank's: tensors, numbers, text.
        device: What the process group carries.

    Returns:
        On rank 0, one block of bytes for each rank, to be read by `open_state`; None elsewhere,
        and where no rank has a state.
    """
    file = io.BytesIO()
    if state:
        torch.save(state, file)
    mine = torch.frombuffer(bytearray(file.getvalue() or b"\0"), dtype=torch.uint8)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = torch.zeros(ranks, dtype=torch.int64, device=device)
    sizes[rank] = file.tell()
    dist.all_reduce(sizes)
    lengths = [int(size) for size in sizes.tolist()]
    if not any(lengths):
        return None
    if rank:
        _send(mine[: lengths[rank]], device)
        return None
    return [
        mine[: lengths[0]],
        *(_receive(lengths[each], each, device) for each in range(1, ranks)),
    ]


def open_state(block: torch.Tensor) -> dict[str, Any]:
    """Returns the state in a block that `gather_states` gave; empty for an empty one.

    Example:
        >>> file = io.BytesIO()
        >>> torch.save({"w": torch.ones(2)}, file)
        >>> open_state(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
        {'w': tensor([1., 1.])}
    """
    if not block.numel():
        return {}
    file = io.BytesIO(block.numpy().tobytes())
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def _send(block: torch.Tensor, device: torch.device) -> None:
    for start in range(0, block.numel(), CHUNK_BYTES):
        dist.send(block[start : start + CHUNK_BYTES].to(device), dst=0)


def _receive(length: int, source: int, device: torch.device) -> torch.Tensor:
    block = torch.empty(length, dtype=torch.uint8)
    for start in range(0, length, CHUNK_BYTES):
        chunk = block[start : start + CHUNK_BYTES]
        there = torch.empty_like(chunk, device=device)
        dist.recv(there, src=source)
        chunk.copy_(there)
    return block
