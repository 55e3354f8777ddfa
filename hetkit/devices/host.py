"""The host: cores, memory and shared memory that this process may really use.

A container or a batch system gives a process less than the machine has. What counts is the
smallest of the affinity mask, the cgroup's quota and the machine, where a cgroup's limit is that
of its tightest ancestor.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_BYTES = 2**60
"""cgroup v1 writes "no limit" as a number near 2⁶³; no machine has 2⁶⁰ bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What this process may use of its machine. What cannot be read is None.

    Args:
        cores: CPUs that the affinity mask allows.
        quota_cores: CPU time per wall time that the cgroup allows, in cores; None: no quota.
        memory_bytes: The machine's memory.
        available_bytes: What new programs can still take of it without swapping.
        limit_bytes: The cgroup's limit on memory; None: no limit.
        shm_bytes, shm_free_bytes: Size of ``/dev/shm``, and what is free in it.

    Example:
        >>> from hetkit.devices.host import Host
        >>> Host(cores=8, quota_cores=1.5).usable_cores
        1.5
    """

    cores: int
    quota_cores: float | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None

    @property
    def usable_cores(self) -> float:
        """The smaller of the affinity mask and the quota."""
        return self.cores if self.quota_cores is None else min(self.cores, self.quota_cores)

    @property
    def usable_bytes(self) -> int | None:
        """The smaller of the machine's memory and the cgroup's limit."""
        known = [size for size in (self.memory_bytes, self.limit_bytes) if size is not None]
        return min(known, default=None)

    @property
    def used_bytes(self) -> int | None:
        """What is taken of the machine's memory; None where a cgroup's limit is what counts."""
        if self.memory_bytes is None or self.available_bytes is None:
            return None
        if self.usable_bytes != self.memory_bytes:
            return None
        return self.memory_bytes - self.available_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What the installed PyTorch was built for, read without importing it.

    Args:
        version: Such as ``"2.13.0+cpu"``.
        cuda, hip: Version of CUDA or ROCm; None where it was built without.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None


def read_host(root: Path = Path("/")) -> Host:
    """Reads what this process may use.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are found; tests give a folder of their own.
    """
    memory = _meminfo(root)
    shm = _filesystem(root / "dev/shm")
    return Host(
        cores=_affinity(),
        quota_cores=_cpu_quota(root),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        limit_bytes=_memory_limit(root),
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
    )


def torch_build() -> TorchBuild | None:
    """Reads what PyTorch was built for from its ``version.py``; None when there is no PyTorch."""
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # a module put into sys.modules by hand has no spec
        return None
    if found is None or found.origin is None:
        return None
    text = _read(Path(found.origin).with_name("version.py")) or ""
    values = dict(re.findall(r"^(\w+)\s*(?::[^=\n]*)?=\s*'([^'\n]*)'", text, re.MULTILINE))
    return TorchBuild(
        version=values.get("__version__", ""), cuda=values.get("cuda"), hip=values.get("hip")
    )


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meminfo(root: Path) -> dict[str, int]:
    text = _read(root / "proc/meminfo") or ""
    return {key: int(kb) * 1024 for key, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


def _filesystem(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroups(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [(_read(folder / name) or "").strip() for name in names]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min((quota for quota in quotas if quota > 0), default=None)


def _memory_limit(root: Path) -> int | None:
    limits = []
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            word = (_read(folder / name) or "").strip()
            if word.isdecimal() and 0 < int(word) < _NO_LIMIT_BYTES:
                limits.append(int(word))
    return min(limits, default=None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yields this process's cgroup of a controller and its ancestors, of v2 and of v1.

    ``/proc/self/cgroup`` has lines ``hierarchy:controllers:path``; v2's has no controllers. In a
    container the path may be the host's, and only its root is mounted: so every prefix is tried.
    """
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controllers, mount / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            yield from (base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
