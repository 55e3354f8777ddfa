from hypothesis import given
from hypothesis import strategies as st

from hetkit.launch.channel import Peer
from hetkit.launch.output import OutputLog


def test_ranks_are_kept_apart_over_generations():
    log = OutputLog()
    log.add(Peer(1, 0), "stdout", "a\nb")
    log.add(Peer(1, 1), "stderr", "other\n")
    log.add(Peer(2, 0), "stderr", "c\nd\n")
    assert log.tail(rank=0) == "a\nbc\nd"
    assert log.tail(rank=0, lines=1) == "d"
    assert log.tail(rank=0, lines=0) == ""
    assert log.tail(rank=1) == "other"
    assert log.tail(rank=9) == ""


@given(st.lists(st.text(max_size=60)), st.integers(1, 100))
def test_it_keeps_the_end_and_no_more_than_its_capacity(texts, capacity):
    log = OutputLog(capacity_chars=capacity)
    for text in texts:
        log.add(Peer(1, 0), "stdout", text)
    kept = log.tail(rank=0, lines=10_000)
    whole = "".join(texts)
    assert len(kept) <= capacity
    assert "\n".join(whole.splitlines()).endswith(kept)
