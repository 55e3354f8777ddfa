import json
import os
import zipfile

import pytest

from hetkit.errors import TaskError
from hetkit.records.checkpoint_file import pack, unpack

FACTS = {"seed": 3, "settings": {"global_batch": 16, "batches": [10, 6]}}


@pytest.fixture
def state(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(os.urandom(100_000))
    return path


def test_a_checkpoint_goes_there_and_back(tmp_path, state):
    pack(tmp_path / "x.ckpt", state, FACTS)
    found, facts = unpack(tmp_path / "x.ckpt", tmp_path)
    assert found.read_bytes() == state.read_bytes()
    assert facts == FACTS


def test_a_failed_writing_keeps_the_file_that_was_there(tmp_path, state):
    path = tmp_path / "x.ckpt"
    pack(path, state, FACTS)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        pack(path, state, {"seed": object()})
    with pytest.raises(FileNotFoundError):
        pack(path, tmp_path / "missing", FACTS)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "x.ckpt"]


def archive(path, facts, state=b"weights"):
    with zipfile.ZipFile(path, "w") as file:
        if facts is not None:
            file.writestr("session.json", facts)
        if state is not None:
            file.writestr("state.pt", state)
    return path


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (None, b"weights"),
        (json.dumps(FACTS), None),
        ("{", b"weights"),
        ("[1, 2]", b"weights"),
        ("3", b"weights"),
        ("{}", b"weights"),
        ('{"seed": 3}', b"weights"),
        ('{"seed": 3, "settings": 4}', b"weights"),
        ('{"seed": "three", "settings": {}}', b"weights"),
    ],
)
def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path, facts, state):
    """Facts of another shape once surfaced as a KeyError in Session.load."""
    path = archive(tmp_path / "x.ckpt", facts, state)
    with pytest.raises(TaskError, match=r"x\.ckpt is not a hetkit checkpoint.*session\.save"):
        unpack(path, tmp_path)


def test_a_cut_off_checkpoint_is_refused(tmp_path, state):
    path = tmp_path / "x.ckpt"
    pack(path, state, FACTS)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TaskError):
        unpack(path, tmp_path)
    damaged = bytearray(whole)
    damaged[50_000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(TaskError):
        unpack(path, tmp_path)


def test_a_folder_or_nothing_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TaskError):
            unpack(path, tmp_path)
