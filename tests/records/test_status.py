import dataclasses

import pytest

from hetkit.records.status import Progress, Status


def test_a_new_session_stands_at_the_beginning():
    status = Status()
    assert (status.state, status.plan, status.applied, status.error) == ("new", None, None, None)
    assert status.settled
    assert status.progress.eta_s is None, "no reading is None, not 0"


@pytest.mark.parametrize(
    ("progress", "done"),
    [
        (Progress(), 0.0),
        (Progress(epoch=0, epochs_target=2, step=0, epoch_steps=10), 0.0),
        (Progress(epoch=0, epochs_target=2, step=5, epoch_steps=10), 0.25),
        (Progress(epoch=1, epochs_target=2, step=10, epoch_first_step=10, epoch_steps=10), 0.5),
        (Progress(epoch=2, epochs_target=2, step=20, epoch_first_step=20, epoch_steps=10), 1.0),
        (Progress(epoch=3, epochs_target=2, step=25, epoch_first_step=20, epoch_steps=10), 1.0),
        (Progress(epoch=1, epochs_target=2), 0.5),
    ],
)
def test_done_is_a_share_of_the_target(progress, done):
    assert progress.done == done


def test_a_status_is_swapped_whole():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Status().state = "ready"
