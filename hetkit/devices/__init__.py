"""What there is: devices, real and emulated, and the figures published about them.

``hetkit.devices`` is this package and ``hk.devices()`` is a function of the public face. Python
binds a package's name in its parent as soon as one of its modules is imported, which would hide
the function: so the package itself can be called, and is the function.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetkit.devices.inventory import Inventory


class _CallableRoom(ModuleType):
    def __call__(self) -> "Inventory":
        """Looks at this machine; see `hetkit.devices.inventory.devices`."""
        from hetkit.devices.inventory import devices

        return devices()


sys.modules[__name__].__class__ = _CallableRoom
