"""run, wait, pause, resume, step, stop, close: every control in every state."""

import gc
import math
import threading
import time

import pytest

import hetkit as hk

LIMIT_S = 60.0


def steps_done(session):
    steps, _ = session.history.series("step_s")
    return [int(step) for step in steps]


def test_a_run_goes_through_its_states_and_returns_at_once(make_session, slow):
    session = make_session(devices=slow)
    seen = {session.state}
    began = time.monotonic()
    session.run(epochs=1)
    assert time.monotonic() - began < 1.0, "run() held the cell"
    while session.state != "ready":
        seen.add(session.state)
        time.sleep(0.001)
        assert time.monotonic() - began < LIMIT_S
    assert seen >= {"new", "starting", "running"}
    session.close()
    assert session.state == "closed"


def test_a_pause_leaves_all_ranks_at_the_same_step_and_resume_goes_on(
    make_session, slow, reach, places
):
    session = make_session(devices=slow)
    session.run(epochs=4)
    reach(session, "running")
    session.pause()
    reach(session, "paused")
    first = places(session)
    assert len(set(first)) == 1
    time.sleep(0.3)
    assert places(session) == first, "a paused rank went on"
    assert session.progress.step == first[0][1] < 16
    session.resume()
    session.wait(LIMIT_S)
    assert places(session) == [(4, 16)] * 2
    assert steps_done(session) == list(range(16))


def test_a_pause_before_the_first_step_holds_there(make_session, reach, places):
    session = make_session()
    session.run(epochs=1)
    session.pause()
    reach(session, "paused")
    assert len(set(places(session))) == 1
    session.resume()
    session.wait(LIMIT_S)


def test_step_executes_exactly_that_many_from_any_resting_state(make_session, reach, places):
    session = make_session()
    session.step(3)
    reach(session, "paused")
    assert places(session) == [(0, 3)] * 2
    session.step()
    session.wait(LIMIT_S)  # the fourth is the last of the run's only epoch
    assert places(session) == [(1, 4)] * 2
    assert len(session.ledger) == 1
    session.run(epochs=3)
    session.pause()
    reach(session, "paused")
    stood = places(session)[0][1]
    session.step(6)  # across an epoch's end
    reach(session, "paused")
    assert {step for _, step in places(session)} == {stood + 6}
    assert steps_done(session) == list(range(stood + 6))
    assert len(session.ledger) == (stood + 6) // 4


def test_stop_ends_the_run_and_the_next_one_goes_on_mid_epoch(make_session, slow, reach, places):
    session = make_session(devices=slow)
    session.step(2)
    reach(session, "paused")
    session.stop()
    reach(session, "ready")
    assert places(session) == [(0, 2)] * 2
    session.run(epochs=1)
    session.wait(LIMIT_S)
    assert places(session) == [(1, 4)] * 2
    assert steps_done(session) == [0, 1, 2, 3]
    assert (session.ledger[0].first_step, session.ledger[0].last_step) == (0, 3)


def test_two_runs_of_two_epochs_are_one_run_of_four_to_the_last_bit(
    make_session, make_task, weights
):
    """Same order of samples, same optimizer state, same schedule, however the run is cut."""
    import torch

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    results = []
    for runs in ((4,), (2, 2)):
        session = make_session(make_task(scheduler=schedule))
        for epochs in runs:
            session.run(epochs)
            session.wait(LIMIT_S)
        rates = session.call(lambda worker: worker.optimizer.param_groups[0]["lr"])
        results.append((weights(session), rates, [row.loss for row in session.ledger]))
        session.close()
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == [pytest.approx(0.05 * 0.7**4)] * 2
    assert results[0][2] == results[1][2]


def test_a_control_that_does_not_fit_the_state_says_what_does(make_session, slow, reach):
    """Nothing may hang, and every refusal must name a way out."""
    session = make_session(devices=slow)
    for control in (session.pause, session.resume, session.model, lambda: session.call(print)):
        with pytest.raises(hk.SessionError, match=r"is new: run\(\) first"):
            control()
    with pytest.raises(hk.SessionError, match=r"run\(\) a few more"):
        session.verdict()
    session.stop()
    session.wait(LIMIT_S)
    session.run(epochs=8)
    reach(session, "running")
    with pytest.raises(hk.SessionError, match=r"is running: wait\(\), pause\(\) or stop\(\) first"):
        session.run()
    session.resume()
    session.pause()
    session.pause()
    reach(session, "paused")
    with pytest.raises(hk.SessionError, match=r"is paused: resume\(\) or stop\(\) first"):
        session.run()
    session.stop()
    reach(session, "ready")
    for control in (session.pause, session.resume):
        with pytest.raises(hk.SessionError, match=r"is ready: run\(\) first"):
            control()


def test_a_closed_session_refuses_everything_at_once(make_session):
    """Commands to a closed session once waited ten seconds for a thread that had ended."""
    session = make_session()
    session.close()
    session.close()
    controls = [session.run, session.step, session.pause, session.resume, session.stop]
    controls += [session.model, lambda: session.call(print), lambda: session.save("never")]
    controls += [lambda: session.set(amp="off")]
    began = time.monotonic()
    for control in controls:
        with pytest.raises(hk.SessionError, match="is closed: make a new Session"):
            control()
    assert time.monotonic() - began < 5.0
    session.wait(1.0)
    assert "closed" in repr(session)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", math.nan])
def test_a_count_that_is_none_is_refused(make_session, value):
    session = make_session()
    for control in (session.run, session.step):
        with pytest.raises(hk.SettingsError, match="must be an int of at least 1"):
            control(value)
    assert session.state == "new"


def test_wait_gives_up_in_time_and_the_training_goes_on(make_session, slow, reach):
    session = make_session(devices=slow)
    session.run(epochs=3)
    with pytest.raises(TimeoutError, match="the training goes on"):
        session.wait(timeout_s=0.05)
    session.wait(LIMIT_S)
    assert len(session.ledger) == 3


def test_closing_while_it_runs_ends_the_workers(make_session, slow, reach, pids, gone, until):
    with make_session(devices=slow) as session:
        session.run(epochs=50)
        reach(session, "running")
        workers = pids(session)
    assert session.state == "closed"
    until(lambda: all(gone(pid) for pid in workers))


def test_closing_while_it_starts_leaves_nothing(make_session, until, gone):
    session = make_session()
    session.run()
    session.close()
    assert session.state == "closed"


def test_stopping_while_it_starts_leaves_warm_workers(make_session, reach, places):
    session = make_session()
    session.run(epochs=3)
    session.stop()
    reach(session, "ready")
    assert len(set(places(session))) == 1
    assert len(session.ledger) < 3


def test_a_close_from_another_thread_ends_the_wait_and_the_call(make_session, slow, reach):
    session = make_session(devices=slow)
    session.run(epochs=50)
    reach(session, "running")
    closing = threading.Timer(0.2, session.close)
    closing.start()
    with pytest.raises(hk.SessionError, match="closed"):
        session.call(lambda worker: time.sleep(LIMIT_S))
    session.wait(LIMIT_S)
    closing.join(LIMIT_S)
    assert session.state == "closed"


def test_a_forgotten_session_ends_its_workers(make_task, fast, pids, gone, until):
    session = hk.Session(make_task(), devices=fast, global_batch=16)
    session.run()
    session.wait(LIMIT_S)
    workers = pids(session)
    del session
    gc.collect()
    until(lambda: all(gone(pid) for pid in workers))


def test_a_second_session_on_busy_devices_says_who_has_them(make_session, fast):
    first = make_session(name="the first")
    second = make_session()
    first.run()
    with pytest.raises(hk.DeviceBusyError, match="the first") as caught:
        second.run()
    assert "close()" in str(caught.value)
    assert second.state == "new"
    first.wait(LIMIT_S)
    first.close()
    second.run()
    second.wait(LIMIT_S)
    assert len(second.ledger) == 1


def test_controls_from_many_threads_at_once_leave_the_ranks_together(
    make_session, slow, reach, places
):
    session = make_session(devices=slow)
    session.run(epochs=30)
    reach(session, "running")

    def press(control):
        for _ in range(10):
            control()

    pressed = [session.pause, session.resume, lambda: session.set(micro_batch=4)]
    threads = [threading.Thread(target=press, args=(control,)) for control in pressed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    session.stop()
    reach(session, "ready")
    assert len(set(places(session))) == 1


def test_the_verdict_comes_when_enough_was_measured(make_session, fast):
    session = make_session(devices=fast)
    session.run(epochs=6)
    session.wait(LIMIT_S)
    verdict = session.verdict()
    assert "emulated" in str(verdict)
