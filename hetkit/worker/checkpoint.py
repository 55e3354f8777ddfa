"""The training state on disk: written whole or not at all, read with ``weights_only=True``.

``torch.save`` rather than ``torch.distributed.checkpoint``: under DDP every rank holds the whole
state, so one file by rank 0 is the simplest thing that loads on any number of devices.
"""

import os
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


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

    Raises:
        ValueError: The file is of another format.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has checkpoint format {state.get('format')!r}, not {FORMAT}.")
    return state
