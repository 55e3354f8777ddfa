"""How arrays and tensors travel: as plain memory, so that a file can hold it and workers map it.

A CPU tensor becomes (storage, dtype, offset, size, stride), and its storage one buffer. Tensors
that share a storage go on sharing it, and a transposed or sliced one costs no copy. What is not a
plain dense CPU tensor is left to PyTorch's own pickling.
"""

import os
import pickle
import sys
from typing import Any


class SharedStorage:
    """The bytes of one tensor storage, once in a pickle however many tensors look at it.

    Args:
        tensor: Any tensor with that storage; it is kept alive as long as this object.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        torch = sys.modules["torch"]
        storage = self._tensor.untyped_storage()
        view = torch.empty(0, dtype=torch.uint8).set_(storage)
        return _storage, (pickle.PickleBuffer(view.numpy()),)


def reduce_tensor(tensor: Any, storages: dict[int, SharedStorage]) -> Any:
    """Reduces a plain CPU tensor.

    Args:
        tensor: A ``torch.Tensor``.
        storages: The storages seen so far in this pickle, by address.

    Returns:
        What ``__reduce__`` would; NotImplemented where PyTorch knows better.
    """
    torch = sys.modules["torch"]
    plain = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_neg())
        and not (tensor.is_complex() and tensor.is_conj())
        and not vars(tensor)
    )
    if not plain:
        return NotImplemented
    address = tensor.untyped_storage().data_ptr()
    storage = storages.setdefault(address, SharedStorage(tensor))
    size, stride = tuple(tensor.size()), tensor.stride()
    return _tensor, (storage, tensor.dtype, tensor.storage_offset(), size, stride)


def reduce_array(array: Any) -> Any:
    """Reduces what NumPy itself would copy into the pickle: strided arrays and mapped files.

    Returns:
        What ``__reduce__`` would; NotImplemented where NumPy's own way is good.
    """
    numpy = sys.modules["numpy"]
    if type(array) is numpy.memmap:
        return _reduce_mapped(array)
    if array.dtype.hasobject or array.flags.c_contiguous or array.flags.f_contiguous:
        return NotImplemented
    return numpy.ascontiguousarray(array).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reduce_mapped(array: Any) -> Any:
    """A whole mapped file travels as its name; a part of one, or a private copy, as an array."""
    numpy = sys.modules["numpy"]
    whole = type(array.base).__name__ == "mmap" and array.flags.c_contiguous
    if whole and array.filename is not None and array.mode in ("r", "r+"):
        edited = os.stat(array.filename).st_mtime_ns
        place = (os.fspath(array.filename), array.mode, array.offset)
        return _mapped, (*place, array.dtype, array.shape, edited)
    plain = numpy.ascontiguousarray(array.view(numpy.ndarray))
    return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _mapped(name: str, mode: Any, offset: int, dtype: Any, shape: Any, edited: int) -> Any:
    import numpy

    return numpy.memmap(name, dtype=dtype, mode=mode, offset=offset, shape=shape)


def _storage(buffer: Any) -> Any:
    import torch

    if not memoryview(buffer).nbytes:
        return torch.empty(0).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(storage: Any, dtype: Any, offset: int, size: Any, stride: Any) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
