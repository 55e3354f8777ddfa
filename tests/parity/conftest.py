"""The suite's files import each other by name, as its script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
