"""Pickling by cloudpickle, with the user's modules by value and large memory out of band."""

import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as internals

from hetkit.errors import PayloadError
from hetkit.launch.arrays import SharedStorage, reduce_array, reduce_tensor
from hetkit.launch.by_value import edited_at, local_modules, pickled_by_value, reduce_module
from hetkit.launch.culprit import find_culprit

OUT_OF_BAND_BYTES = 64 << 10

Modules = dict[str, types.ModuleType]


class Pickled(NamedTuple):
    """A pickle in three parts.

    Args:
        inband: The pickle itself.
        buffers: Large memory that it refers to, in order.
        sources: Module files that its reader must import, and when each was last edited (ns).
    """

    inband: bytes
    buffers: list[memoryview]
    sources: tuple[tuple[str, int], ...]


def pickled(thing: object, name: str, *, in_band: bool = False) -> Pickled:
    """Pickles an object with all that it needs.

    A local module that is used as a whole but holds something that cannot be pickled (a lock, an
    open file) is left to the workers to import, from the same files.

    Args:
        thing: What to pickle.
        name: What a message calls it.
        in_band: Whether to keep large memory in the pickle too.

    Raises:
        PayloadError: A part cannot be pickled; the message names it.

    Example:
        >>> from hetkit.launch.pickling import pickled, unpickled
        >>> unpickled(pickled(lambda x: x + 1, "function").inband)(1)
        2
    """
    modules = local_modules()
    while True:
        file = io.BytesIO()
        pickler = _Pickler(file, modules, in_band=in_band)
        try:
            with pickled_by_value(modules):
                pickler.dump(thing)
            return Pickled(file.getvalue(), pickler.buffers, edited_at(modules))
        except Exception as error:
            stubborn = _stubborn(pickler.whole_modules, modules)
            if not stubborn:
                raise _refusal(thing, name, modules, error) from error
            modules = {n: m for n, m in modules.items() if n.partition(".")[0] not in stubborn}


def unpickled(inband: bytes, buffers: list[memoryview] | None = None) -> Any:
    """Returns what was pickled; a class that came from this process is that very class."""
    return _Unpickler(io.BytesIO(inband), buffers=buffers).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, modules: Modules, *, in_band: bool) -> None:
        take = None if in_band else self._take_out_of_band
        super().__init__(file, protocol=5, buffer_callback=take)
        self.buffers: list[memoryview] = []
        self.whole_modules: set[str] = set()
        self._modules = modules
        self._storages: dict[int, SharedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and kind is torch.Tensor:
            return reduce_tensor(obj, self._storages)
        if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
            return reduce_array(obj)
        if kind is types.CodeType:
            # cloudpickle calls the file of every function "<dynamic-code>", which leaves the user
            # without the place of an error; a cell's file is named by its text, so no harm is done.
            make, parts = internals._code_reduce(obj)[:2]
            return make, tuple(
                obj.co_filename if part == "<dynamic-code>" else part for part in parts
            )
        if isinstance(obj, types.ModuleType) and obj.__name__ in self._modules:
            self.whole_modules.add(obj.__name__)
            return reduce_module(obj)
        if isinstance(obj, BaseException) and _has_own_init(kind):
            return _remade, (kind, obj.args), vars(obj) or None
        return super().reducer_override(obj)

    def _take_out_of_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Keeps a large buffer; returns whether it is to stay in band instead."""
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(raw)
        return False


class _Unpickler(pickle.Unpickler):
    """Leaves alone the classes that this process already has.

    cloudpickle knows a class that left this process again by its tracker id, but would then
    replace its methods by the sender's copies, whose globals are not this process's.
    """

    def __init__(self, file: Any, *, buffers: list[memoryview] | None) -> None:
        super().__init__(file, buffers=buffers)
        self._known: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module != internals.__name__:
            return found
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return self._noting_known(found)
        return self._sparing_known(found) if name == "_class_setstate" else found

    def _noting_known(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            tracker_id = arguments[-2]
            known = tracker_id in internals._DYNAMIC_CLASS_TRACKER_BY_ID
            kind = make(*arguments)
            if known:
                self._known.append(kind)
            return kind

        return noting

    def _sparing_known(self, set_state: Callable[..., Any]) -> Callable[..., Any]:
        def sparing(kind: Any, state: Any) -> Any:
            return kind if any(kind is one for one in self._known) else set_state(kind, state)

        return sparing


class _Nowhere(io.RawIOBase):
    """Takes everything, keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _has_own_init(kind: type[BaseException]) -> bool:
    own_init = isinstance(kind.__init__, types.FunctionType)
    return own_init and kind.__reduce__ is BaseException.__reduce__


def _remade(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """Makes an exception without its ``__init__``, which may want more than its ``args``."""
    return kind.__new__(kind, *arguments)


def _can_pickle(thing: object, modules: Modules) -> bool:
    try:
        with pickled_by_value(modules):
            _Pickler(_Nowhere(), modules, in_band=False).dump(thing)
    except Exception:  # noqa: BLE001  (whatever it is, it cannot be pickled)
        return False
    return True


def _stubborn(used: set[str], modules: Modules) -> set[str]:
    """Returns the top-level packages among ``used`` whose variables cannot all be pickled."""
    return {n.partition(".")[0] for n in used if not _can_pickle(modules[n], modules)}


def _refusal(thing: object, name: str, modules: Modules, error: Exception) -> PayloadError:
    path, part = find_culprit(thing, name, lambda part: _can_pickle(part, modules))
    kind = type(part)
    type_name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return PayloadError(
        f"{path} (type {type_name}) cannot be sent to the workers: {error}. Create it inside the "
        "function that uses it, or give a callable that makes it in the worker."
    )
