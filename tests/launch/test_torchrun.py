import os
import stat

import pytest

from hetkit.errors import LaunchError
from hetkit.launch.channel import Peer
from hetkit.launch.orders import WorkerStart
from hetkit.launch.torchrun import Gathering, Seat, read_note


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "must both be set"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "to ints"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "not a valid place"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "on several hosts"),
    ],
)
def test_a_seat_that_makes_no_sense_is_refused(environment, says):
    with pytest.raises(LaunchError, match=says):
        Seat.of(environment)


def test_a_note_reaches_its_rank_alone_and_is_gone(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir(mode=0o700)
    note = WorkerStart(session="s", peer=Peer(1, 1), endpoint="ipc:///x")
    Gathering(folder, lambda: None).fork(note, print)
    assert stat.S_IMODE((folder / "rank-1").stat().st_mode) == 0o600
    assert read_note(folder, 1) == note
    assert os.listdir(folder) == []
    with pytest.raises(LaunchError, match="left no note for rank 1"):
        read_note(folder, 1)


def test_a_folder_that_others_may_enter_is_not_looked_into(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir(mode=0o700)
    Gathering(folder, lambda: None).fork(WorkerStart(session="s", peer=Peer(1, 0)), print)
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="not a private folder of yours"):
        read_note(folder, 0)


def test_ending_the_ranks_is_asking_them_to_leave(tmp_path):
    asked = []
    Gathering(tmp_path, lambda: asked.append("leave")).kill("s")
    assert asked == ["leave"]
