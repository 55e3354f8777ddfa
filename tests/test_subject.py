import functools

import pytest

import hetkit as hk
from hetkit.subject import LoopSubject, subject_of


@pytest.mark.parametrize("loop", [lambda worker: None, functools.partial(print, "here"), [].append])
def test_whatever_takes_one_argument_is_a_loop(loop):
    assert isinstance(subject_of(loop), LoopSubject)


@pytest.mark.parametrize("thing", [lambda: None, lambda a, b: None, dict, hk.Task, None, "train"])
def test_anything_else_is_refused(thing):
    with pytest.raises(hk.SettingsError, match="function of one argument"):
        subject_of(thing)


def test_a_loop_makes_no_local_steps():
    with pytest.raises(hk.SettingsError, match="exchanges in every step"):
        hk.Session(lambda worker: None, devices="cpu*2", sync_every=4)
