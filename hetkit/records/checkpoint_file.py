"""A checkpoint as one file: the training state beside the facts that a session starts from.

A zip of two members: ``state.pt``, which only workers open (``weights_only=True``), and
``session.json``, plain data that the kernel can read without PyTorch.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetkit.errors import TaskError

_STATE, _FACTS = "state.pt", "session.json"


def pack(path: Path, state: Path, facts: Mapping[str, Any]) -> None:
    """Writes a checkpoint: whole or not at all.

    Args:
        path: Where to.
        state: The training state that rank 0 wrote.
        facts: What JSON can hold.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_FACTS, json.dumps(dict(facts)))
            archive.write(state, _STATE)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def unpack(path: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Takes a checkpoint apart.

    Args:
        path: The checkpoint.
        folder: Where the training state is put.

    Returns:
        The training state's path, and the facts.

    Raises:
        TaskError: The file is missing, or is no checkpoint of ours.
    """
    state = folder / "loaded.ckpt"
    try:
        with zipfile.ZipFile(path) as archive:
            facts = _checked(json.loads(archive.read(_FACTS)))
            with archive.open(_STATE) as source, open(state, "wb") as target:
                shutil.copyfileobj(source, target)
    except FileNotFoundError as error:
        raise TaskError(f"there is no file {path}: give one that session.save() wrote.") from error
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise TaskError(
            f"{path} is not a hetkit checkpoint ({error}): give a file that session.save() wrote."
        ) from error
    return state, facts


def _checked(facts: Any) -> dict[str, Any]:
    whole = isinstance(facts, dict) and isinstance(facts.get("settings"), dict)
    if not whole or not isinstance(facts.get("seed"), int):
        raise ValueError("it lacks the seed or the settings")
    return dict(facts)


def settings_that_fit(facts: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Returns a checkpoint's settings without lists for another number of ranks.

    Example:
        >>> settings_that_fit({"settings": {"amp": ["off", "fp16"], "global_batch": 8}}, 3)
        {'global_batch': 8}
        >>> settings_that_fit({"settings": {"hierarchy": [[0, 1], [2]]}}, 3)
        {'hierarchy': [[0, 1], [2]]}
    """
    return {
        name: value
        for name, value in facts["settings"].items()
        if not isinstance(value, list) or _ranks(value) == world_size
    }


def _ranks(values: list[Any]) -> int:
    return sum(len(each) if isinstance(each, list) else 1 for each in values)
