"""A user's own process: what it loads, what its ``__main__`` defines, what its end leaves."""

import os
import signal
import tempfile
from pathlib import Path

import psutil

LIMIT_S = 60.0


def test_a_kernel_that_trains_loads_no_torch_and_is_never_forked(run_script):
    """Law 4. The task's functions import torch inside, that is, in the workers alone."""
    output = run_script("""
        import subprocess
        os.fork = lambda: sys.exit("the kernel was forked")

        began = time.monotonic()
        session = hk.Session(task(), devices=fleet, global_batch=16)
        session.run(epochs=3)
        assert time.monotonic() - began < 1.0, "the cell was held"
        session.set(lr="x0.5")
        session.wait(60)
        print(session.ledger, session, session.history, session.plan)
        saved = session.save("law4.ckpt")
        session.close()
        hk.Session.load(saved, task(), devices=fleet).close()
        os.remove(saved)
        heavy = {"torch", "IPython", "ipywidgets", "pandas"} & set(sys.modules)
        assert not heavy, heavy
        print("law 4 holds")
    """)
    assert "law 4 holds" in output


def test_what_a_scripts_main_defines_goes_there_and_back(run_script):
    """Its exception class is the very same one; a class defined again reaches a new session."""
    output = run_script("""
        class Unlucky(Exception):
            pass

        def unlucky(model, batch):
            unlucky.calls = getattr(unlucky, "calls", 0) + 1
            if unlucky.calls == 5:
                raise Unlucky("in the fifth call")
            return loss(model, batch)

        with hk.Session(task(loss=unlucky), devices=fleet, global_batch=16) as session:
            session.run(2)
            try:
                session.wait(60)
            except Unlucky as error:
                assert error is session.error
                notes = "".join(error.__notes__)
                assert "on rank" in notes and "in unlucky" in notes, notes
                print("caught as itself")

        def unlucky(model, batch):
            print("mended", flush=True)
            return loss(model, batch)

        with hk.Session(task(loss=unlucky), devices=fleet, global_batch=16) as session:
            session.run(1)
            session.wait(60)
            assert "mended" in session.output.tail(0)
    """)
    assert "caught as itself" in output


def test_an_interrupt_of_wait_pauses_the_training(run_script):
    """Ctrl-C, or the notebook's stop button, during session.wait()."""
    output = run_script("""
        import signal
        fleet = hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=0.005)
        session = hk.Session(task(), devices=fleet, global_batch=16)
        session.run(epochs=50)

        def interrupt():
            while session.progress.step < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            session.wait(60)
        except KeyboardInterrupt:
            while session.state != "paused":
                time.sleep(0.01)
            print("paused at", set(session.call(lambda worker: worker.step)))
        session.stop()
        while session.state != "ready":
            time.sleep(0.01)
        session.close()
    """)
    assert output.count("paused at {") == 1
    assert "," not in output


def test_no_worker_outlives_a_killed_kernel(start_script, until, gone, tmp_path):
    """Law 5. Nursery, workers, their DataLoader processes, the session's files: after kill -9."""
    script = start_script("""
        fleet = hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=0.005)
        session = hk.Session(task(num_workers=1), devices=fleet, global_batch=16)
        session.run(epochs=500)
        while session.progress.step < 2:
            assert session.error is None
            time.sleep(0.01)
        print("training", flush=True)
        time.sleep(600)
    """)
    assert script.stdout.readline() == "training\n"
    family = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]
    assert len(family) >= 5, "a nursery, two workers, two loaders"
    os.kill(script.pid, signal.SIGKILL)
    script.wait(LIMIT_S)
    until(lambda: all(gone(pid) for pid in family), limit_s=5.0)
    until(lambda: not list(Path(tempfile.gettempdir()).glob("hetkit-*/task*")), limit_s=5.0)


def test_a_kernel_that_ends_without_close_leaves_nothing(run_script, until, gone):
    output = run_script("""
        import tempfile
        session = hk.Session(task(), devices=fleet, global_batch=16)
        session.run(1)
        session.wait(60)
        print(*session.call(lambda worker: os.getpid()), session._folder)
    """)
    *pids, folder = output.split()
    until(lambda: all(gone(int(pid)) for pid in pids))
    assert not os.path.exists(folder)
