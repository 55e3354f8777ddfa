"""Lets the widgets' tests import the public fake session as ``widgets.fake_session``."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
