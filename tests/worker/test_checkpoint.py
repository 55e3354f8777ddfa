import os
import pickle

import pytest
import torch

from hetkit.worker import checkpoint
from hetkit.worker.checkpoint import read_state, write_state


def test_a_state_comes_back_with_optimizer_and_schedulers(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ]
    state = {
        "step": 7,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rates": [scheduler.state_dict() for scheduler in schedulers],
    }
    write_state(tmp_path / "a.ckpt", state)
    read = read_state(tmp_path / "a.ckpt")
    assert read["step"] == 7
    for name, value in model.state_dict().items():
        assert torch.equal(read["model"][name], value)
    torch.optim.AdamW(model.parameters()).load_state_dict(read["optimizer"])
    schedulers[0].load_state_dict(read["rates"][0])


def test_a_write_that_fails_leaves_the_file_before_it_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    write_state(path, {"step": 1})

    def fail(*args):
        raise OSError("no space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, broken, fail)
            with pytest.raises(OSError, match="no space"):
                write_state(path, {"step": 2})
        assert read_state(path)["step"] == 1
        assert os.listdir(tmp_path) == ["a.ckpt"]
    write_state(path, {"step": 3})
    assert read_state(path)["step"] == 3


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_file_with_code_in_it_is_refused_and_the_code_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": checkpoint.FORMAT, "model": Payload()}, "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        read_state(tmp_path / "evil.ckpt")
    assert not (tmp_path / "executed").exists()


def test_another_format_says_which(tmp_path):
    torch.save({"format": 99}, tmp_path / "new.ckpt")
    with pytest.raises(ValueError, match="format 99, not 1"):
        read_state(tmp_path / "new.ckpt")
