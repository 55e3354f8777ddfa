import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from hetkit.errors import LaunchError
from hetkit.launch.channel import Peer
from hetkit.launch.local import (
    Exited,
    Forked,
    Nursery,
    NurseryLost,
    WorkerStart,
    shared_nursery,
)

WAIT_S = 60


def test_making_a_nursery_and_forking_do_not_wait(tmp_path):
    events = queue.SimpleQueue()
    nursery = Nursery()
    for rank in range(64):  # far more than the socket takes while nobody reads it
        start = WorkerStart(session="s", peer=Peer(1, rank), entry="builtins:print")
        nursery.fork(start, events.put)
    assert not nursery.wait_ready(0)  # all of that was before it could even listen
    nursery.close()
    assert not nursery.alive
    with pytest.raises(LaunchError, match="shared_nursery"):
        nursery.fork(start, events.put)


def test_a_worker_finds_the_kernels_surroundings(crew, monkeypatch, tmp_path):
    crew.nursery.wait_ready(WAIT_S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETKIT_TEST_KERNEL", "set after the nursery was made")
    monkeypatch.syspath_prepend(str(tmp_path / "a folder"))
    other = crew.fork("sleep", rank=7)
    peer = crew.fork("report", env={"HETKIT_TEST": "grün"})
    forked, exited = crew.await_event(Forked, peer), crew.await_event(Exited, peer)
    facts = json.loads(crew.text(peer))
    assert (exited.exitcode, exited.signal) == (0, None)
    assert facts["cwd"] == str(tmp_path)
    assert facts["path"] == sys.path
    assert (facts["extra"], facts["kernel"]) == ("grün", "set after the nursery was made")
    assert facts["pid"] == facts["pgid"] == forked.pid == exited.pid
    assert facts["sid"] == crew.nursery.pid != os.getsid(0)
    assert facts["torch"]
    assert facts["sigint"]
    assert facts["stdin"] == ""
    assert facts["name"] == "hetkit-rank0"
    assert "__file__" not in facts["main"]
    crew.nursery.kill(crew.session, other)
    assert crew.await_event(Exited, other).signal == signal.SIGKILL


def test_a_worker_holds_nothing_of_others(crew):
    for rank in range(1, 4):
        crew.fork("sleep", rank=rank)
    peer = crew.fork("report")
    crew.await_event(Exited, peer)
    fds = json.loads(crew.text(peer))["fds"]
    assert [link for link in fds if "socket" in link or "eventpoll" in link] == []
    assert (
        len([link for link in fds if "pipe" in link]) == 4
    )  # its two streams and the life pipe, twice


def test_keys_are_neither_in_a_command_line_nor_in_an_environment(crew):
    peer = crew.fork("sleep")
    crew.await_text("up", peer)
    pids = [crew.nursery.pid, crew.await_event(Forked, peer).pid]
    for pid in pids:
        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                content = file.read()
            assert b"SPSP" not in content
            assert b"CSCS" not in content


def test_last_words_come_before_the_end(crew):
    peer = crew.fork("last_words")
    exited = crew.await_event(Exited, peer)
    assert (exited.exitcode, exited.signal) == (None, signal.SIGKILL)
    assert crew.text(peer) == "out: last words\n"
    assert crew.text(peer, "stderr") == "err: last words"
    assert isinstance(crew.seen[-1], Exited)


@pytest.mark.parametrize(
    ("entry", "exitcode", "stdout", "stderr"),
    [
        ("wrong", 1, "", "KeyError: 'lost in the worker'"),
        ("leave", 7, "", ""),
        ("unflushed", 0, "no newline at the end", ""),
        ("no_such_entry", 1, "", "no_such_entry"),
        ("close_streams", 3, "", ""),
    ],
)
def test_every_end_is_told(crew, entry, exitcode, stdout, stderr):
    exited = crew.run(entry)
    assert (exited.exitcode, exited.signal) == (exitcode, None)
    assert stdout in crew.text(exited.peer)
    assert stderr in crew.text(exited.peer, "stderr")


def test_a_segfault_leaves_the_workers_traceback(crew):
    exited = crew.run("crash")
    assert exited.signal == signal.SIGSEGV
    assert "in crash" in crew.text(exited.peer, "stderr")


def test_a_flood_stays_bounded_and_wedges_nobody(crew):
    exited = crew.run("flood")
    text = crew.text(exited.peer)
    assert exited.exitcode == 0
    assert text.endswith("the flood's end\n")
    assert "bytes dropped" in text
    assert len(text) < 5e6


def test_junk_and_cut_characters_become_text(crew):
    exited = crew.run("junk")
    assert "\ufffd" in crew.text(exited.peer)
    assert crew.text(exited.peer, "stderr") == "größer → 日本語 🙂\n" * 200


@pytest.mark.parametrize("entry", ["family", "fork_family"])
def test_killing_a_worker_ends_its_children(crew, entry, alive):
    peer = crew.fork(entry)
    other = crew.fork("sleep", rank=1)
    crew.await_text("\n", peer)
    child = int(crew.text(peer).split()[1])
    crew.nursery.kill(crew.session, peer)
    assert crew.await_event(Exited, peer).signal == signal.SIGKILL
    assert alive.gone([child])
    assert alive.is_alive(crew.await_event(Forked, other).pid)


def test_killing_a_session_spares_others(crew, alive):
    peers = [crew.fork("sleep", rank=rank) for rank in range(3)]
    stranger = type(crew)(crew.nursery, "another session")
    stranger.await_text("up", stranger.fork("sleep"))
    crew.nursery.kill(crew.session)
    for peer in peers:
        assert crew.await_event(Exited, peer).signal == signal.SIGKILL
    assert alive.is_alive(stranger.await_event(Forked).pid)
    crew.nursery.kill("another session")
    stranger.await_event(Exited)


def test_a_worker_imports_an_edited_file_anew(crew, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for generation, word in enumerate(("before", "after"), start=1):
        (tmp_path / "hetkit_local_module.py").write_text(f"WORD = {word!r}\n")
        peer = crew.fork("import_local", generation=generation, preload=("hetkit_local_module",))
        crew.await_event(Exited, peer)
        assert crew.text(peer) == word + "\n"


def test_installed_modules_are_preloaded_and_local_ones_left_to_the_worker(
    crew, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hetkit_local_module.py").write_text("")
    crew.nursery.preload(("wave", "hetkit_local_module", "no_such_module"))
    peer = crew.fork("preloaded")
    crew.await_event(Exited, peer)
    assert crew.text(peer) == "['wave']\n"
    exited = crew.run("preloaded", generation=2, preload=("no_such_module",))
    assert exited.exitcode == 1
    assert "no_such_module" in crew.text(exited.peer, "stderr")


def test_a_fault_in_a_listener_harms_no_other(crew, caplog):
    def fail(event):
        raise RuntimeError("a fault of the listener")

    start = WorkerStart(session="faulty", peer=Peer(1, 0), entry="nursery_entries:report")
    crew.nursery.fork(start, fail)
    assert crew.run("report").exitcode == 0
    assert "a fault of the listener" in caplog.text


def test_a_torch_py_beside_the_notebook_is_not_taken_for_pytorch(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise RuntimeError('the wrong torch')\n")
    monkeypatch.chdir(tmp_path)
    nursery = Nursery()
    assert nursery.wait_ready(WAIT_S)
    nursery.close()


def test_an_interpreter_that_is_none_is_refused():
    with pytest.raises(LaunchError, match="no/python"):
        Nursery(python="/no/python")


def test_a_nursery_that_cannot_start_says_why(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    python.chmod(0o755)
    events = queue.SimpleQueue()
    nursery = Nursery(python=str(python))
    start = WorkerStart(session="s", peer=Peer(1, 0))
    try:
        nursery.fork(start, events.put)
        lost = events.get(timeout=WAIT_S)
        assert isinstance(lost, NurseryLost)
        reason = lost.reason
    except LaunchError as error:  # it was gone before the call
        reason = str(error)
    assert "code 3" in reason
    assert "no torch here" in reason
    nursery.close()


def test_one_nursery_is_shared_and_replaced_when_it_has_died(alive):
    nurseries = [None] * 4

    def take(place):
        nurseries[place] = shared_nursery()

    threads = [threading.Thread(target=take, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(nurseries)) == 1
    first = nurseries[0]
    os.kill(first.pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while first.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    second = shared_nursery()
    assert second is not first
    assert second.alive
    second.close()
    assert alive.gone([second.pid])


def test_the_shared_nursery_is_closed_when_the_interpreter_exits(alive):
    script = "from hetkit.launch.local import shared_nursery as s; print(s().pid)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert alive.gone([int(done.stdout)], within_s=5)


def test_a_forked_process_gets_a_nursery_of_its_own():
    script = """
import os, sys
from hetkit.launch.local import shared_nursery
mine = shared_nursery()
pid = os.fork()
if pid == 0:
    theirs = shared_nursery()
    good = theirs is not mine and theirs.alive and not mine.alive
    theirs.close()
    mine.close()
    os._exit(0 if good else 1)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert mine.alive
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
