"""The guard against leaks, tried on tests that leak."""

import os
import re
import subprocess
import sys
from pathlib import Path

LEAKY = """
import os, socket, subprocess, sys, tempfile, threading, time
KEPT = []

def test_processes():
    KEPT.append(subprocess.Popen(["sleep", "60"]))
    code = "import subprocess; subprocess.Popen(['sleep', '61'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
    KEPT.append(subprocess.Popen(["true"]))
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)

def test_nothing(): pass

def test_threads():
    for name in ("hetkit-x", "other"):
        threading.Thread(target=time.sleep, args=(4,), name=name, daemon=True).start()

def test_descriptors(): KEPT.extend([socket.socketpair(), os.pipe()])

def test_files():
    tempfile.mkdtemp(prefix="hetkit-")
    tempfile.mkdtemp(prefix="other-")

def test_soon_gone():
    subprocess.Popen(["sleep", "0.1"], stdin=subprocess.DEVNULL)
    threading.Thread(target=time.sleep, args=(0.1,), name="hetkit-y").start()

def test_shared_nursery():
    from hetkit.launch.local import shared_nursery
    with open("nursery.pid", "w") as file:
        file.write(str(shared_nursery().pid))

def test_clean():
    with socket.socket(), tempfile.TemporaryDirectory(prefix="hetkit-"):
        subprocess.run(["true"], check=True)
"""

FOUND = {
    "processes": [
        r"process \d+: sleep 60",
        r"process \d+: sleep 61",
        r"process \d+: ended, and nobody has waited for it",
        r"process \d+: .*python.* -m pytest .*",
    ],
    "threads": ["thread hetkit-x"],
    "descriptors": [r"descriptor socket:.*"] * 2 + [r"descriptor pipe:.*"] * 2,
    "files": [r"file hetkit-\w+ in the temporary folder"],
}


def test_the_guard_finds_what_leaks_and_nothing_else(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(re.sub(r"GRACE_S = .*", "GRACE_S = 1.5", conftest))
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    run = subprocess.run(
        [*command, "--rootdir=.", "--color=no", "test_leaky.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    # Where CI is set, pytest's closing summary repeats every message in full.
    told = run.stdout.partition("====\n")[2].partition(" short test summary ")[0]
    parts = re.split(r"_+ ERROR at teardown of test_(\w+) _+\n", told)
    reports = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert reports.keys() == FOUND.keys(), run.stdout
    for name, patterns in FOUND.items():
        lines = re.findall(r"^  (.+)$", reports[name], re.MULTILINE)
        assert len(lines) == len(patterns), run.stdout
        for pattern in patterns:
            assert any(re.fullmatch(pattern, line) for line in lines), (pattern, run.stdout)
    assert run.returncode == 1
    pids = re.findall(r"^  process (\d+):", run.stdout, re.MULTILINE)
    pids.append((tmp_path / "nursery.pid").read_text())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "all was ended"
