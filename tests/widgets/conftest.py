"""Lets the widgets' tests import the public fake session as ``widgets.fake_session``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


@pytest.fixture
def session() -> Iterator[Any]:
    from widgets.fake_session import FakeSession

    made = FakeSession(3)
    yield made
    made.close()


@pytest.fixture
def said() -> list[str]:
    """What the status line was told; a control's `Report` is its ``append``."""
    return []
