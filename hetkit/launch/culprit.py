"""Finds what in an object cannot be pickled, and the path to it, for a message one can act on."""

import functools
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DEPTH_MAX = 20
_SEARCH_S = 3.0
_ITEMS_MAX = 1000


def find_culprit(
    root: object, name: str, can_pickle: Callable[[object], bool]
) -> tuple[str, object]:
    """Returns the path to the innermost part that cannot be pickled, and that part.

    Args:
        root: What could not be pickled.
        name: Its name, the path's first word.
        can_pickle: Tells whether a part can be pickled.

    Example:
        >>> import threading
        >>> from hetkit.launch.culprit import find_culprit
        >>> lock = threading.Lock()
        >>> find_culprit({"loss": [1, lock]}, "task", lambda part: part == 1)[0]
        "task['loss'][1]"
    """
    deadline = time.monotonic() + _SEARCH_S
    path, part = name, root
    seen = {id(root)}
    for _ in range(_DEPTH_MAX):
        for label, child in _parts(part):
            if time.monotonic() > deadline:
                return path, part
            if id(child) not in seen and not can_pickle(child):
                seen.add(id(child))
                path, part = path + label, child
                break
        else:
            return path, part
    return path, part


def _parts(whole: object) -> Iterator[tuple[str, object]]:
    """Yields the parts that pickling ``whole`` by value would go into, with their labels."""
    if isinstance(whole, types.FunctionType):
        yield from _function_parts(whole)
    elif isinstance(whole, types.MethodType):
        yield " → its object", whole.__self__
        yield " → its function", whole.__func__
    elif isinstance(whole, functools.partial):
        yield " → function", whole.func
        yield from _items(" → argument ", dict(enumerate(whole.args)) | whole.keywords)
    elif isinstance(whole, Mapping):
        for key, value in list(whole.items())[:_ITEMS_MAX]:
            yield f"[{key!r:.40}]", value
    elif isinstance(whole, (list, tuple, set, frozenset)):
        for place, value in enumerate(list(whole)[:_ITEMS_MAX]):
            yield f"[{place}]", value
    elif isinstance(whole, types.ModuleType):
        yield from _items(" → its variable ", vars(whole))
    elif isinstance(whole, (staticmethod, classmethod)):
        yield "", whole.__func__
    elif isinstance(whole, property):
        yield " → its getter", whole.fget
    else:
        yield from _object_parts(whole)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if not _is_empty(cell):
            yield f' → closure variable "{name}"', cell.cell_contents
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f' → global variable "{name}"', function.__globals__[name]
    yield from _items(" → default ", dict(enumerate(function.__defaults__ or ())))
    yield from _items(" → default ", function.__kwdefaults__ or {})
    yield from _items(" → attribute ", vars(function))


def _object_parts(whole: Any) -> Iterator[tuple[str, object]]:
    members = dict(getattr(whole, "__dict__", {}))
    for kind in () if isinstance(whole, type) else type(whole).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(whole, slot):
                members.setdefault(slot, getattr(whole, slot))
    for name, value in members.items():
        yield f".{name}", value
    if _is_python_class(type(whole)):
        yield " → its class", type(whole)


def _is_python_class(kind: type) -> bool:
    return any(isinstance(member, types.FunctionType) for member in vars(kind).values())


def _items(label: str, items: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for name, value in items.items():
        yield label + (f'"{name}"' if isinstance(name, str) else str(name)), value


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names


def _is_empty(cell: "types.CellType") -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True
