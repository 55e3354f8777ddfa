"""Who trains on what: one session per device, over all processes of a user.

A claim is an exclusive ``flock`` on a file named after the device's key, in a folder that only
this user can enter. The kernel drops the lock when its holder dies, however it dies. The file
says who holds it, so that a refusal can say so too. A released file is removed while it is still
locked; whoever had opened it before sees, once it has the lock, that the name no longer leads to
its file, and opens it anew::

    A  open f₁ · lock ──────────── unlink · unlock
    B           open f₁ · wait ·············· lock f₁, name ≠ f₁ → again: open f₂ · lock
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hetkit.devices.device import Device
from hetkit.errors import DeviceBusyError, DeviceError

_TRIES = 5
_PAUSE_S = 0.01
"""A lock is also held for a moment while a stale file is swept away: try again before refusing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a device.

    Args:
        pid: Its process.
        owner: Name of the session.
        since: When it took the device, in seconds since the epoch.
    """

    pid: int
    owner: str
    since: float

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.since))
        where = "this process" if self.pid == os.getpid() else f"process {self.pid}"
        return f"{self.owner} of {where} since {when}"


class Claim:
    """The right to train on some devices, until it is closed or its process ends.

    Example:
        >>> import hetkit as hk
        >>> from hetkit.devices.busy import claim
        >>> fleet = hk.emulate("1xT4")
        >>> with claim(fleet, "first"):
        ...     try:
        ...         claim(fleet, "second")
        ...     except hk.DeviceBusyError as error:
        ...         print(str(error)[:35])
        T4 #0 is in use by first of this pr
    """

    def __init__(self, held: Sequence[tuple[Path, int]]) -> None:
        self._release = weakref.finalize(self, _release, tuple(held), os.getpid())

    @property
    def closed(self) -> bool:
        """Whether the devices are free again."""
        return not self._release.alive

    def close(self) -> None:
        """Frees the devices. Closing twice is fine."""
        self._release()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def claim(devices: Iterable[Device], owner: str, *, folder: Path | None = None) -> Claim:
    """Claims all of the devices, or none.

    Args:
        devices: What is to be trained on; the key tells one from another.
        owner: What a person would call the session, for the refusal of others.
        folder: Where the lock files are. None (default): `runtime_folder`.

    Raises:
        DeviceBusyError: A device is taken, by another process or by this one.
        DeviceError: The lock files cannot be made.
    """
    folder = runtime_folder() if folder is None else folder
    _sweep(folder)
    held: list[tuple[Path, int]] = []
    try:
        for device in sorted(devices, key=lambda device: device.key):
            path = folder / lock_name(device.key)
            held.append((path, _lock(path, device)))
            _write(held[-1][1], Holder(pid=os.getpid(), owner=owner, since=time.time()))
    except OSError as error:
        _release(held, os.getpid())
        raise DeviceError(
            f"cannot lock devices in {folder}: {error}. Is its file system writable and local?"
        ) from error
    except DeviceError:
        _release(held, os.getpid())
        raise
    return Claim(held)


def runtime_folder() -> Path:
    """Returns this user's private folder for lock files, and makes it.

    It is ``$XDG_RUNTIME_DIR/hetkit``, else ``/run/user/<uid>/hetkit`` where that exists, so that
    a login session and a service of the same user meet, else ``hetkit-<uid>`` in the folder for
    temporary files.

    Raises:
        DeviceError: The folder belongs to someone else, or is not a folder.
    """
    uid = os.getuid()
    given = os.environ.get("XDG_RUNTIME_DIR")
    for parent in (Path(given) if given else None, Path(f"/run/user/{uid}")):
        if parent is not None and _is_mine(parent):
            return _private(parent / "hetkit")
    return _private(Path(tempfile.gettempdir()) / f"hetkit-{uid}")


def lock_name(key: str) -> str:
    """Returns the name of a key's lock file: readable, and never the same for two keys."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", key)[:40].strip("-")
    return f"{readable}.{hashlib.sha256(key.encode()).hexdigest()[:12]}.lock"


def _is_mine(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise DeviceError(f"cannot make the folder for device locks, {folder}: {error}.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DeviceError(
            f"{folder} is not a folder of yours: someone else made it, so locks in it cannot be "
            f"trusted. Remove it, or set XDG_RUNTIME_DIR to a private folder."
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _lock(path: Path, device: Device) -> int:
    """Returns the descriptor of the file that ``path`` leads to, locked."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        descriptor = _try_lock(path)
        if descriptor is not None:
            return descriptor
    raise DeviceBusyError(
        f"{device.label} is in use by {_read(path) or 'another session'}. Free it by "
        f"that session's close() (hk.sessions() lists those of this process), by ending its "
        f"process, or choose other devices."
    )


def _try_lock(path: Path) -> int | None:
    """Locks the file that ``path`` leads to; None when it is taken or was just removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _write(descriptor: int, holder: Holder) -> None:
    text = json.dumps({"pid": holder.pid, "owner": holder.owner, "since": holder.since})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _read(path: Path) -> Holder | None:
    """Returns who wrote the file; None when nobody has yet, or it is not ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return Holder(pid=int(found["pid"]), owner=str(found["owner"]), since=float(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _release(held: Sequence[tuple[Path, int]], pid: int) -> None:
    """Removes and unlocks the files; a forked child, which shares the lock, leaves it alone."""
    for path, descriptor in held:
        if os.getpid() == pid:
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Removes the files of processes that died without a word; they hold no lock any more."""
    for path in folder.glob("*.lock"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                path.unlink()
        os.close(descriptor)
