"""Inside a rank. PyTorch is imported here and nowhere else.

This room has the name of a public function, `hetkit.script.worker`. Python binds a room to its
package once it is imported, so ``hk.worker(…)`` finds either: the room can be called too.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, **arguments: Any) -> Any:
        return import_module("hetkit.script").worker(**arguments)


sys.modules[__name__].__class__ = _Room
