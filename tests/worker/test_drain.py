import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetkit.worker.drain import HELD_BYTES, RATE_BYTES_PER_S, Allowance, Drain


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(write, False)
    drain = Drain(read, "stdout", Allowance())
    yield drain, write
    os.close(write)


def test_text_passes_at_once_and_in_bundles_then(pipe):
    drain, write = pipe
    assert drain.read() is None
    assert drain.pass_on(0.0) == ""
    os.write(write, b"one\n")
    assert drain.read() == 4
    assert drain.holds
    assert drain.pass_on(0.0) == "one\n"
    for line in (b"two\n", b"three\n"):
        os.write(write, line)
        drain.read()
        assert drain.pass_on(0.01) == ""
    assert drain.pass_on(0.1) == "two\nthree\n"
    assert not drain.holds
    os.write(write, b"last")
    assert drain.finish() == "last"
    assert drain.read() is None


def test_a_flood_is_cut_to_its_rate_and_its_tail_kept(pipe):
    drain, write = pipe
    text, seconds, turns = "", 20, 2000
    for turn in range(turns):
        os.write(write, b"x" * 60_000 + b"\n")
        assert drain.read()
        text += drain.pass_on(turn * seconds / turns)
    os.write(write, "the very end ü".encode())
    text += drain.finish()
    assert text.endswith("the very end ü")
    dropped = sum(int(n) for n in re.findall(r"\[… (\d+) bytes dropped\]", text))
    kept = text.count("x")
    assert dropped + kept == pytest.approx(turns * 60_001, rel=1e-3)
    assert kept <= RATE_BYTES_PER_S * (seconds + 1) + 2 * HELD_BYTES


@given(st.text(), st.lists(st.integers(1, 9)))
def test_characters_cut_in_two_are_put_together(text, cuts):
    read, write = os.pipe()
    drain, got, wire = Drain(read, "stdout", Allowance()), "", text.encode()
    for turn, cut in enumerate(cuts):
        os.write(write, wire[:cut]) if wire[:cut] else None
        wire = wire[cut:]
        drain.read()
        got += drain.pass_on(float(turn))
    if wire:
        os.write(write, wire)
    os.close(write)
    assert got + drain.finish() == text


def test_the_pipes_end_is_told_from_an_empty_pipe():
    read, write = os.pipe()
    drain = Drain(read, "stdout", Allowance())
    assert drain.read() is None
    os.close(write)
    assert drain.read() == 0
    assert drain.finish() == ""
