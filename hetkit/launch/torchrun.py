"""Ranks that somebody else has started: what ``torchrun`` tells them, and how they gather.

::

    rank 0   private folder (0700) · rank-1 (0600): address and keys ─── path over torchrun's store
    rank 1                                 reads rank-1, connects ◀───────┘

Keys are never on a command line, in an environment or on the store: whoever may read the folder is
the same user. So all ranks must be on one host.
"""

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetkit.errors import LaunchError
from hetkit.launch.ends import Peer
from hetkit.launch.orders import Event, WorkerStart


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """This process's place among the ranks.

    Args:
        rank: Its rank.
        world_size: Their number.

    Example:
        >>> Seat.of({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
        Seat(rank=1, world_size=2)
        >>> Seat.of({})
        Seat(rank=0, world_size=1)
    """

    rank: int
    world_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Seat":
        """Returns the seat that the variables of ``torchrun`` tell; without them, the only one.

        Raises:
            LaunchError: They are incomplete, or tell of several hosts.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls(rank=0, world_size=1)
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"RANK and WORLD_SIZE must both be set, to ints, as torchrun does: {error}."
            ) from error
        if local != world_size:
            raise LaunchError(
                f"{world_size} ranks on several hosts ({local} on this one): hetkit's own loop "
                "runs on one host for now. Say torchrun --nnodes 1 --nproc_per_node …"
            )
        if not 0 <= rank < world_size:
            raise LaunchError(f"RANK is {rank} and WORLD_SIZE {world_size}: not a valid place.")
        return cls(rank=rank, world_size=world_size)


class Gathering:
    """Stands where a nursery would: tells processes that are there already what they are.

    Args:
        folder: The private folder, which it shares with the other ranks.
        dismiss: Called when the workers are to end.
    """

    alive = True

    def __init__(self, folder: Path, dismiss: Callable[[], None]) -> None:
        self._folder = folder
        self._dismiss = dismiss

    def fork(self, start: WorkerStart, on_event: Callable[[Event], None]) -> None:
        """Leaves a note for the rank, which is waiting for it."""
        path = self._folder / f"rank-{start.peer.rank}"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.msgpack.encode(start))

    def kill(self, session: str, peer: Peer | None = None) -> None:
        """Asks the ranks to leave; whoever started them ends those that do not."""
        self._dismiss()


def read_note(folder: Path, rank: int) -> WorkerStart:
    """Returns the note that rank 0 has left for ``rank``, and removes it.

    Raises:
        LaunchError: The folder is not this user's own, or holds no note.
    """
    path = folder / f"rank-{rank}"
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise LaunchError(f"{folder} is not a private folder of yours: it is not looked into.")
        note = msgspec.msgpack.decode(path.read_bytes(), type=WorkerStart)
        path.unlink()
    except (OSError, msgspec.MsgspecError) as error:
        raise LaunchError(
            f"rank 0 has left no note for rank {rank} in {folder}: {error}"
        ) from error
    return note
