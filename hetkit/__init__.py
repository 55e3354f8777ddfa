"""hetkit: interactive experiments on unlike GPUs, from a notebook.

The public names are loaded when they are first used (PEP 562): ``import hetkit`` loads neither
PyTorch nor a Jupyter library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetkit.compression import Int4, Int8, PowerSGD, Threshold, TopK
    from hetkit.devices.device import Device, DeviceSpec, Link, SlowDown
    from hetkit.devices.fleet import Fleet, emulate
    from hetkit.devices.inventory import devices
    from hetkit.errors import (
        DataError,
        DeviceBusyError,
        DeviceError,
        HetkitError,
        LaunchError,
        LossError,
        MissingExtraError,
        PayloadError,
        PlanError,
        ProtocolError,
        RemoteError,
        SessionError,
        SettingsError,
        TaskError,
        WorkerDied,
        WorkerError,
    )
    from hetkit.planning.fleet_plan import plan_fleet
    from hetkit.planning.task_profile import TaskProfile
    from hetkit.rehearsal import profile
    from hetkit.script import worker
    from hetkit.session import Session
    from hetkit.settings import Settings
    from hetkit.task import Task
    from hetkit.view import sessions

_HOMES = {
    "hetkit.compression": ("Int4", "Int8", "PowerSGD", "Threshold", "TopK"),
    "hetkit.devices.device": ("Device", "DeviceSpec", "Link", "SlowDown"),
    "hetkit.devices.fleet": ("Fleet", "emulate"),
    "hetkit.devices.inventory": ("devices",),
    "hetkit.errors": (
        "DataError",
        "DeviceBusyError",
        "DeviceError",
        "HetkitError",
        "LaunchError",
        "LossError",
        "MissingExtraError",
        "PayloadError",
        "PlanError",
        "ProtocolError",
        "RemoteError",
        "SessionError",
        "SettingsError",
        "TaskError",
        "WorkerDied",
        "WorkerError",
    ),
    "hetkit.planning.fleet_plan": ("plan_fleet",),
    "hetkit.planning.task_profile": ("TaskProfile",),
    "hetkit.rehearsal": ("profile",),
    "hetkit.script": ("worker",),
    "hetkit.session": ("Session",),
    "hetkit.settings": ("Settings",),
    "hetkit.task": ("Task",),
    "hetkit.view": ("sessions",),
}

__version__ = "0.1.0"
__all__ = [
    "DataError",
    "Device",
    "DeviceBusyError",
    "DeviceError",
    "DeviceSpec",
    "Fleet",
    "HetkitError",
    "Int4",
    "Int8",
    "LaunchError",
    "Link",
    "LossError",
    "MissingExtraError",
    "PayloadError",
    "PlanError",
    "PowerSGD",
    "ProtocolError",
    "RemoteError",
    "Session",
    "SessionError",
    "Settings",
    "SettingsError",
    "SlowDown",
    "Task",
    "TaskError",
    "TaskProfile",
    "Threshold",
    "TopK",
    "WorkerDied",
    "WorkerError",
    "devices",
    "emulate",
    "plan_fleet",
    "profile",
    "sessions",
    "worker",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'hetkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", "__doc__", "__all__"})
