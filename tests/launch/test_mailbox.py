import threading
import time

import pytest

from hetkit.errors import SessionError
from hetkit.launch.mailbox import Command, Mailbox


def make():
    return Mailbox[str](closed="it is closed: make another.")


def serve(mailbox, items):
    for _ in range(items):
        item = mailbox.take(10.0)
        if isinstance(item, Command):
            item.execute()


def test_items_come_in_the_order_in_which_they_were_put():
    mailbox = make()
    for letter in "abc":
        mailbox.put(letter)
    assert [mailbox.take(0) for _ in range(4)] == ["a", "b", "c", None]


def test_whoever_asks_gets_what_the_command_raised():
    mailbox = make()
    thread = threading.Thread(target=serve, args=(mailbox, 2))
    thread.start()
    with pytest.raises(ZeroDivisionError):
        mailbox.ask(lambda: 1 / 0, timeout_s=10.0)
    mailbox.ask(lambda: None, timeout_s=10.0)
    thread.join(10.0)


def test_a_thread_that_does_not_come_to_it_is_not_waited_for_longer_than_asked():
    with pytest.raises(TimeoutError):
        make().ask(lambda: None, timeout_s=0.01)


def test_commands_that_wait_when_it_closes_are_refused_not_forgotten():
    """Their callers once waited ten seconds for nothing."""
    mailbox = make()
    waiting = Command(lambda: None)
    mailbox.put(waiting)
    mailbox.put("a letter")
    mailbox.close()
    mailbox.close()
    late = Command(lambda: None)
    mailbox.put(late)
    mailbox.put("too late")
    for command in (waiting, late):
        with pytest.raises(SessionError, match="closed: make another"):
            command.done.result(timeout=0)
    assert mailbox.take(0) is None


def test_no_command_is_lost_however_close_it_comes_to_the_end():
    for _ in range(50):
        mailbox = make()
        closing = threading.Thread(target=mailbox.close)
        closing.start()
        command = Command(lambda: None)
        mailbox.put(command)
        closing.join(10.0)
        with pytest.raises(SessionError):
            command.done.result(timeout=10.0)


def test_items_are_handled_ahead_while_no_command_is_lost():
    mailbox = make()
    done = []
    for n in range(3):
        mailbox.put(Command(lambda n=n: done.append(n)))
        mailbox.put(f"item {n}")
    seen = []
    mailbox.take_until(time.monotonic() + 10.0, lambda item: seen.append(item) or len(seen) == 2)
    assert seen == ["item 0", "item 1"]
    while (left := mailbox.take(0)) is not None:
        left.execute() if isinstance(left, Command) else seen.append(left)
    assert sorted(done) == [0, 1, 2], "a command was lost"
    assert seen == ["item 0", "item 1", "item 2"]


def test_taking_until_gives_up_at_its_deadline():
    make().take_until(time.monotonic() + 0.01, lambda item: True)
