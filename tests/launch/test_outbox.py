import os
import select
import threading

import pytest

from hetkit.launch.outbox import Outbox


def readable(outbox):
    return bool(select.select([outbox], [], [], 0)[0])


def test_a_poller_wakes_for_an_item_and_for_the_end():
    outbox = Outbox()
    assert not readable(outbox)
    outbox.put(1)
    outbox.put(2)
    assert readable(outbox)
    assert list(outbox.drain()) == [1, 2]
    assert not readable(outbox)
    assert list(outbox.drain()) == []
    assert outbox.finish()
    assert readable(outbox)
    assert not outbox.finish()
    assert not outbox.put(3)
    outbox.close()
    outbox.close()
    with pytest.raises(ValueError, match="closed"):
        outbox.fileno()


def test_a_late_sender_never_writes_to_a_descriptor_of_another():
    outbox = Outbox()
    outbox.close()
    reused = os.eventfd(0, os.EFD_NONBLOCK)
    assert not outbox.put(1)
    assert not outbox.finish()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reused)
    os.close(reused)


def test_many_senders_lose_nothing():
    outbox, got = Outbox(), []
    threads = [
        threading.Thread(target=lambda i=i: [outbox.put((i, j)) for j in range(500)])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    while len(got) < 4000:
        assert select.select([outbox], [], [], 20)[0]
        got += outbox.drain()
    for thread in threads:
        thread.join()
    assert sorted(got) == [(i, j) for i in range(8) for j in range(500)]
    assert all([j for k, j in got if k == i] == list(range(500)) for i in range(8))
    outbox.close()
