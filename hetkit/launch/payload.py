"""The payload: how a task reaches the workers, and how exceptions and results come back.

::

    kernel: dump(task, folder)           <digest>.task     the pickle, in band
                                         <digest>.arrays   large arrays and tensors, 64-byte aligned
    worker: load(path)    ── maps ─────▶ private copy-on-write views: one copy for all workers

Pickle is opened only from the session's own private folder or from the authenticated channel.
"""

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from hetkit.errors import PayloadError
from hetkit.launch.pickling import Pickled, pickled, unpickled

_ALIGN_BYTES = 64
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """A pickled object in a folder.

    Args:
        path: The file to `load`.
        digest: Equal for two payloads that do the same with the same data.
        size_bytes: Size of the pickle and the arrays together.

    Example:
        >>> import tempfile
        >>> from hetkit.launch.payload import dump
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     payload = dump([1, 2, 3], Path(folder))
        ...     payload.digest == dump([1, 2, 3], Path(folder)).digest
        True
    """

    path: str
    digest: str
    size_bytes: int

    def remove(self) -> None:
        """Removes the files; workers that have loaded them keep their maps."""
        for path in (Path(self.path), _arrays_of(Path(self.path))):
            path.unlink(missing_ok=True)


class _Contents(msgspec.Struct, frozen=True):
    inband: bytes
    places: tuple[tuple[int, int], ...]


def dump(task: object, folder: Path, name: str = "task") -> Payload:
    """Pickles an object with all that it needs into ``folder``.

    Args:
        task: What to pickle: functions and classes of ``__main__`` and of local modules by value.
        folder: Where to; made if need be, readable by this user alone.
        name: What a message calls the object.

    Returns:
        The payload. Dumping an unchanged object again gives the same digest and writes nothing;
        data edited in place gives another. (A set of strings made anew may, too: its order is not
        fixed.)

    Raises:
        PayloadError: A part cannot be pickled, or the folder is full; the message names it.

    Example:
        >>> import tempfile
        >>> from hetkit.launch.payload import dump, load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     payload = dump({"loss": lambda x: x + 1}, Path(folder))
        ...     load(payload.path)["loss"](1)
        2
    """
    pickle = pickled(task, name)
    digest = _digest(pickle)
    path = folder / f"{digest}.task"
    sizes = [buffer.nbytes for buffer in pickle.buffers]
    size_bytes = sum(sizes) + len(pickle.inband)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            if sizes:
                _write(_arrays_of(path), _laid_out(pickle.buffers))
            _write(path, [msgspec.msgpack.encode(_Contents(pickle.inband, _places(sizes)))])
    except OSError as error:
        raise PayloadError(
            f"the {name}'s {size_bytes} bytes cannot be written to {folder}: {error}. "
            "Set TMPDIR to a folder with more room."
        ) from error
    return Payload(path=str(path), digest=digest, size_bytes=size_bytes)


def load(path: str | Path) -> Any:
    """Returns what was dumped. Large arrays are views of a private, copy-on-write map.

    Raises:
        PayloadError: The file is not this user's own, or not a payload.
    """
    path = Path(path)
    try:
        contents = msgspec.msgpack.decode(_read_own(path), type=_Contents)
    except msgspec.MsgspecError as error:
        raise PayloadError(f"{path} is not a hetkit payload: {error}") from error
    if not contents.places:
        return unpickled(contents.inband)
    with _arrays_of(path).open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return unpickled(
        contents.inband, [whole[start : start + size] for start, size in contents.places]
    )


def dump_bytes(thing: object, name: str = "object") -> bytes:
    """Pickles something small by the same rules: an exception, a function, a result.

    Raises:
        PayloadError: A part cannot be pickled; the message names it.
    """
    return pickled(thing, name, in_band=True).inband


def load_bytes(wire: bytes) -> Any:
    """Returns what `dump_bytes` pickled; a class that came from this process is that very class."""
    return unpickled(wire)


def _digest(pickle: Pickled) -> str:
    """Hashes all that the workers would get, the arrays' contents too.

    An array's address would be cheaper, but tells neither an edit in place nor a new array where
    an old one was. Hashing frees the GIL, so it goes at the pace of several cores.
    """
    chunks = [
        buffer[start : start + _CHUNK_BYTES]
        for buffer in (memoryview(pickle.inband), *pickle.buffers)
        for start in range(0, buffer.nbytes, _CHUNK_BYTES)
    ]
    sizes = [buffer.nbytes for buffer in pickle.buffers]
    whole = hashlib.blake2b(repr((sizes, pickle.sources)).encode(), digest_size=16)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for part in pool.map(_hash, chunks):
            whole.update(part)
    return whole.hexdigest()


def _hash(chunk: memoryview) -> bytes:
    return hashlib.blake2b(chunk).digest()


def _arrays_of(path: Path) -> Path:
    return path.with_suffix(".arrays")


def _places(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns where each buffer begins, and its size."""
    starts = accumulate((size + -size % _ALIGN_BYTES for size in sizes), initial=0)
    return tuple(zip(starts, sizes, strict=False))


def _laid_out(buffers: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    for buffer in buffers:
        yield buffer
        yield bytes(-buffer.nbytes % _ALIGN_BYTES)


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file that is there as a whole or not at all; mkstemp makes it 0600."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read_own(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PayloadError(f"{path} is writable by others than you: it is not opened.")
        return file.read()
