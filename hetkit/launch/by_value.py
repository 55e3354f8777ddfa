"""Which modules travel by value: the user's own files, which they edit while they experiment.

Functions and classes of ``__main__`` always travel by value. So do those of local modules: files
outside the standard library, site-packages, editable installs and hetkit. An edited and reloaded
module thus reaches the workers as the kernel has it, not as a file said when a worker imported it.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

_PRIVATE = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


def local_modules() -> dict[str, types.ModuleType]:
    """Returns the imported modules that the user edits, by name, and not the installed ones."""
    homes, editable = _homes(), _editable_packages()
    return {
        name: module
        for name, module in _loose_modules(homes)
        if name.partition(".")[0] not in editable
    }


def edited_at(by_value: Container[str]) -> tuple[tuple[str, int], ...]:
    """Returns when the files that workers import by themselves were last edited, in ns.

    Args:
        by_value: Names of modules that need not be looked at.
    """
    found = []
    for name, module in _loose_modules(_homes()):
        if name not in by_value:
            with contextlib.suppress(OSError):
                found.append((name, os.stat(str(module.__file__)).st_mtime_ns))
    return tuple(sorted(found))


@contextlib.contextmanager
def pickled_by_value(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Has cloudpickle take these modules by value meanwhile, and leaves its registry as it was."""
    with _registry_lock():
        before = cloudpickle.list_registry_pickle_by_value()
        fresh = [modules[name] for name in modules if name not in before]
        for module in fresh:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in fresh:
                cloudpickle.unregister_pickle_by_value(module)


def reduce_module(module: types.ModuleType) -> tuple[Any, ...]:
    """Reduces a module to its variables; unlike cloudpickle's own way, modules may form circles."""
    state = {name: value for name, value in vars(module).items() if name not in _PRIVATE}
    return types.ModuleType, (module.__name__,), state, None, None, _fill


def _fill(module: types.ModuleType, state: dict[str, Any]) -> None:
    vars(module).update(state)


@functools.cache
def _registry_lock() -> threading.RLock:
    # cloudpickle's registry is one for the whole process.
    return threading.RLock()


def _loose_modules(homes: tuple[str, ...]) -> Iterator[tuple[str, types.ModuleType]]:
    """Yields the imported Python files outside the folders of installed modules."""
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not isinstance(module, types.ModuleType):
            continue
        file = getattr(module, "__file__", None)
        if module.__name__ != name or not isinstance(file, str) or not file.endswith(".py"):
            continue
        if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
            continue
        if not file.startswith(homes) and not os.path.realpath(file).startswith(homes):
            yield name, module


@functools.cache
def _homes() -> tuple[str, ...]:
    """Returns the folders whose modules are installed, hetkit's own among them."""
    paths = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return tuple({kind(path) + os.sep for path in paths for kind in (str, os.path.realpath)})


@functools.cache
def _editable_packages() -> frozenset[str]:
    """Returns the top-level packages of editable installs (PEP 610): workers import them."""
    names: set[str] = set()
    for distribution in importlib.metadata.distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            names.add(re.sub(r"[-_.]+", "_", distribution.metadata["Name"]).lower())
            names.update((distribution.read_text("top_level.txt") or "").split())
    return frozenset(names)
