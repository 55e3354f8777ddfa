import os
import sys
from pathlib import Path

import pytest

from hetkit.devices.host import Host, read_host, torch_build

MEMINFO = "MemTotal:       16384000 kB\nMemFree:  1 kB\nMemAvailable:    8192000 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    host = read_host()
    assert host.cores == len(os.sched_getaffinity(0))
    assert 0 < host.usable_cores <= host.cores
    assert host.memory_bytes is not None
    assert host.usable_bytes is not None
    assert host.usable_bytes <= host.memory_bytes


def test_nothing_to_read_is_none(tmp_path: Path) -> None:
    assert read_host(tmp_path) == Host(cores=len(os.sched_getaffinity(0)))


def test_memory_and_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = read_host(tree(tmp_path, {"proc/meminfo": MEMINFO}))
    assert host.memory_bytes == 16384000 * 1024
    assert host.available_bytes == 8192000 * 1024
    assert host.limit_bytes is None
    assert host.used_bytes == 8192000 * 1024
    assert host.shm_bytes is not None
    assert host.shm_free_bytes is not None
    assert host.shm_free_bytes <= host.shm_bytes


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/step/memory.max": "4294967296\n",
            "sys/fs/cgroup/job/memory.max": "max\n",
        },
    )
    host = read_host(root)
    assert (host.quota_cores, host.limit_bytes, host.usable_bytes) == (1.5, 2**32, 2**32)
    assert host.usable_cores == min(host.cores, 1.5)
    assert host.used_bytes is None


def test_cgroup_v1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n3:pids:/\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1073741824\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    host = read_host(root)
    assert (host.quota_cores, host.limit_bytes) == (0.5, 2**30)


def test_a_container_that_sees_only_the_root_of_its_cgroup(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../docker/0123abcd\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/memory.max": "1000000\n",
        },
    )
    host = read_host(root)
    assert (host.quota_cores, host.limit_bytes) == (2.0, 1000000)


@pytest.mark.parametrize("text", ["", "junk", "max", "0 0", "1 0", "-5 100000", "²³ 1"])
def test_junk_in_a_cgroup_is_no_quota(tmp_path: Path, text: str) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text}
    assert read_host(tree(tmp_path, files)).quota_cores is None


def test_torch_build_is_read_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(
        tmp_path,
        {
            "torch/__init__.py": "raise RuntimeError('imported')",
            "torch/version.py": "from typing import Optional\n__version__ = '2.9.0'\n"
            "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
        },
    )
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    build = torch_build()
    assert build is not None
    assert (build.version, build.cuda, build.hip) == ("2.9.0", "12.8", None)


def test_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torch_build() is None
