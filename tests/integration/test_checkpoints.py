"""The trained model back in the kernel, and checkpoints that go on elsewhere."""

import pytest
import torch

import hetkit as hk

LIMIT_S = 60.0


def losses(session):
    _, values = session.history.series("loss")
    return values.tolist()


def test_the_model_comes_back_as_trained_and_the_tasks_own_stays_as_it_was(
    make_session, make_task, numbers, pids
):
    """model() once loaded the trained weights into the very module that the task had been given."""
    own = torch.nn.Linear(3, 1)
    initial = {name: value.clone() for name, value in own.state_dict().items()}
    session = make_session(make_task(model=own))
    session.run(5)
    session.wait(LIMIT_S)
    workers = pids(session)
    trained = session.model()
    assert trained is not own
    assert all(torch.equal(own.state_dict()[name], value) for name, value in initial.items())
    features, targets = numbers
    with torch.no_grad():
        before = (own(features) - targets).square().mean()
        after = (trained(features) - targets).square().mean()
    assert after < before / 2
    assert all(parameter.device.type == "cpu" for parameter in trained.parameters())
    session.run(1)
    session.wait(LIMIT_S)
    assert pids(session) == workers, "the unchanged task got fresh workers"


def test_taking_the_model_leaves_the_kernels_random_numbers_alone(make_session, reach):
    session = make_session()
    session.step(1)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    reach(session, "paused")
    session.model()
    assert torch.equal(torch.rand(1), expected)


def test_a_curve_goes_on_over_two_one_and_three_devices(make_session, make_task, tmp_path, reach):
    """Saved mid-epoch and at an epoch's end; run(n) once counted its epochs from the first."""
    whole = make_session(devices="cpu*2", seed=4)
    whole.run(6)
    whole.wait(LIMIT_S)
    expected = losses(whole)
    whole.close()
    first = make_session(devices="cpu*2", seed=4)
    first.step(6)
    reach(first, "paused")
    seen = losses(first)
    path = first.save(tmp_path / "two.ckpt")
    first.close()
    task = make_task()
    with hk.Session.load(path, task, devices="cpu") as second:
        assert second.settings.global_batch == 16
        second.run(2)
        second.wait(LIMIT_S)
        seen += losses(second)
        assert second.progress.step == 12
        path = second.save(tmp_path / "one.ckpt")
    with hk.Session.load(path, task, devices="cpu*3") as third:
        third.run(3)
        third.wait(LIMIT_S)
        seen += losses(third)
        assert [row.epoch for row in third.ledger] == [3, 4, 5]
    assert seen == pytest.approx(expected, rel=1e-4)


def test_steps_count_from_where_a_checkpoint_stands(
    make_session, make_task, tmp_path, reach, places
):
    session = make_session(devices="cpu*2")
    session.step(6)
    reach(session, "paused")
    path = session.save(tmp_path / "six.ckpt")
    with hk.Session.load(path, make_task(), devices="cpu*2") as loaded:
        with pytest.raises(hk.SessionError, match=r"is new: run\(\) first"):
            loaded.call(lambda worker: worker.step)  # model() works: its state lies in the file
        loaded.step(1)
        reach(loaded, "paused")
        assert places(loaded) == [(1, 7)] * 2
        loaded.step(3)
        reach(loaded, "paused")
        assert places(loaded) == [(2, 10)] * 2


def test_a_checkpoint_keeps_the_settings_that_fit(make_session, make_task, tmp_path):
    session = make_session(lr=0.02, compression="fp16")
    session.run(1)
    session.wait(LIMIT_S)
    path = session.save(tmp_path / "kept.ckpt")
    with hk.Session.load(path, make_task(), devices="cpu*3", clip_norm=2.0) as loaded:
        assert (loaded.settings.lr, loaded.settings.compression) == (0.02, "fp16")
        assert loaded.settings.batches == "auto", "a split for two devices cannot fit three"
        assert loaded.settings.clip_norm == 2.0


@pytest.mark.parametrize("content", [None, b"", b"not a zip", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_no_checkpoint_is_refused(make_task, tmp_path, content):
    path = tmp_path / "strange.ckpt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(hk.TaskError, match=r"is not a hetkit checkpoint|there is no file"):
        hk.Session.load(path, make_task(), devices="cpu")


def test_a_checkpoint_of_another_model_fails_with_the_mismatch(make_session, make_task, tmp_path):
    session = make_session()
    session.run(1)
    session.wait(LIMIT_S)
    path = session.save(tmp_path / "other.ckpt")
    other = make_task(model=lambda: torch.nn.Linear(3, 1))
    with hk.Session.load(path, other, devices="cpu") as loaded:
        loaded.run(1)
        with pytest.raises(RuntimeError, match="Missing key"):
            loaded.wait(LIMIT_S)


def test_saving_over_a_file_keeps_it_until_the_new_one_is_whole(make_session, tmp_path):
    session = make_session()
    session.run(1)
    session.wait(LIMIT_S)
    path = tmp_path / "same.ckpt"
    session.save(path)
    before = path.read_bytes()
    session.run(1)
    session.wait(LIMIT_S)
    session.save(path)
    assert path.read_bytes() != before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["same.ckpt"]


def test_saving_into_a_folder_that_is_not_there_says_so_and_training_goes_on(
    make_session, tmp_path
):
    session = make_session()
    session.run(1)
    session.wait(LIMIT_S)
    with pytest.raises(OSError, match="missing"):
        session.save(tmp_path / "missing" / "x.ckpt")
    session.run(1)
    session.wait(LIMIT_S)
