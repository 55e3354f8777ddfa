import gc
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hetkit as hk
from hetkit.devices.busy import claim, lock_name, runtime_folder
from hetkit.devices.device import Device

LIMIT_S = 30
HOLD = """
import sys, time
from pathlib import Path
from hetkit.devices.busy import claim
from hetkit.devices.device import Device
device = Device(name="cpu", kind="cpu", index=0, key="cpu:0")
held = claim([device], "their session", folder=Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def cpu(index: int) -> Device:
    return Device(name="cpu", kind="cpu", index=index, key=f"cpu:{index}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def hold_elsewhere(folder: Path) -> "subprocess.Popen[str]":
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_claim_of_this_process_is_refused(folder: Path) -> None:
    with (
        claim([cpu(0)], "session A", folder=folder),
        pytest.raises(hk.DeviceBusyError, match=r"cpu #0 is in use by session A of this process"),
    ):
        claim([cpu(0)], "session B", folder=folder)
    claim([cpu(0)], "session B", folder=folder).close()


def test_the_refusal_says_who_where_and_what_to_do(folder: Path) -> None:
    holder = hold_elsewhere(folder)
    try:
        with pytest.raises(hk.DeviceBusyError) as refusal:
            claim([cpu(0)], "mine", folder=folder)
    finally:
        holder.communicate(timeout=LIMIT_S)
    text = str(refusal.value)
    assert f"their session of process {holder.pid} since " in text
    assert "hk.sessions()" in text
    claim([cpu(0)], "mine", folder=folder).close()


def test_a_killed_holder_frees_its_devices_and_leaves_no_file(folder: Path) -> None:
    holder = hold_elsewhere(folder)
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=LIMIT_S)
    assert (folder / lock_name("cpu:0")).exists()
    claim([cpu(1)], "mine", folder=folder).close()
    assert list(folder.iterdir()) == []


def test_closing_twice_is_fine_and_leaves_no_file(folder: Path) -> None:
    held = claim([cpu(0), cpu(1)], "mine", folder=folder)
    assert len(list(folder.iterdir())) == 2
    held.close()
    held.close()
    assert held.closed
    assert list(folder.iterdir()) == []


def test_a_second_close_does_not_free_the_next_claim(folder: Path) -> None:
    first = claim([cpu(0)], "first", folder=folder)
    first.close()
    with claim([cpu(0)], "second", folder=folder):
        first.close()
        with pytest.raises(hk.DeviceBusyError):
            claim([cpu(0)], "third", folder=folder)


def test_all_or_none(folder: Path) -> None:
    with claim([cpu(1)], "other", folder=folder):
        with pytest.raises(hk.DeviceBusyError, match="cpu #1"):
            claim([cpu(0), cpu(1), cpu(2)], "mine", folder=folder)
        claim([cpu(0), cpu(2)], "mine", folder=folder).close()


def test_a_forgotten_claim_is_freed(folder: Path) -> None:
    claim([cpu(0)], "forgotten", folder=folder)
    gc.collect()
    claim([cpu(0)], "next", folder=folder).close()


def test_a_forked_child_does_not_free_its_parents_devices(folder: Path) -> None:
    with claim([cpu(0)], "parent", folder=folder) as held:
        child = multiprocessing.get_context("fork").Process(target=held.close)
        child.start()
        child.join(LIMIT_S)
        with pytest.raises(hk.DeviceBusyError):
            claim([cpu(0)], "other", folder=folder)


def test_a_forked_child_does_not_keep_what_its_parent_freed(folder: Path) -> None:
    held = claim([cpu(0)], "parent", folder=folder)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    try:
        held.close()
        claim([cpu(0)], "other", folder=folder).close()
    finally:
        child.kill()
        child.join(LIMIT_S)


def test_no_two_threads_ever_hold_one_device(folder: Path) -> None:
    inside, worst, taken = [0], [0], [0]
    guard = threading.Lock()

    def compete() -> None:
        for _ in range(60):
            try:
                held = claim([cpu(0)], "thread", folder=folder)
            except hk.DeviceBusyError:
                continue
            with guard:
                inside[0] += 1
                taken[0] += 1
                worst[0] = max(worst[0], inside[0])
            with guard:
                inside[0] -= 1
            held.close()

    threads = [threading.Thread(target=compete) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert worst[0] == 1
    assert taken[0] >= 1
    assert list(folder.iterdir()) == []


def test_no_descriptor_is_left(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with claim([cpu(0)], "mine", folder=folder):
        for _ in range(5):
            with pytest.raises(hk.DeviceBusyError):
                claim([cpu(0)], "other", folder=folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_says_nothing_is_another_session(folder: Path) -> None:
    with claim([cpu(0)], "mine", folder=folder):
        (folder / lock_name("cpu:0")).write_bytes(b"\xff{")
        with pytest.raises(hk.DeviceBusyError, match="in use by another session"):
            claim([cpu(0)], "other", folder=folder)


def test_two_keys_never_share_a_file() -> None:
    assert lock_name("cuda:GPU-1/2") != lock_name("cuda:GPU-1:2")
    assert "/" not in lock_name("../../etc/passwd")
    assert len(lock_name("x" * 1000)) < 100


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert folder == tmp_path / "hetkit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(runtime_folder().stat().st_mode) == 0o700


def test_without_a_runtime_folder_it_is_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr("hetkit.devices.busy._is_mine", lambda folder: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_folder() == tmp_path / f"hetkit-{os.getuid()}"


def test_a_link_or_a_file_in_its_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hetkit").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(hk.DeviceError, match="not a folder of yours"):
        runtime_folder()
    (tmp_path / "hetkit").unlink()
    (tmp_path / "hetkit").write_text("")
    with pytest.raises(hk.DeviceError, match="cannot make the folder"):
        runtime_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to someone else")
def test_a_folder_of_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "hetkit").mkdir(mode=0o700)
    os.chown(tmp_path / "hetkit", 12345, 12345)
    with pytest.raises(hk.DeviceError, match="someone else made it"):
        runtime_folder()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    with pytest.raises(hk.DeviceError, match="cannot lock devices in"):
        claim([cpu(0)], "mine", folder=tmp_path / "missing")
