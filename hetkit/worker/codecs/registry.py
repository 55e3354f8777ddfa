"""The codecs by name. A new codec is added here and to `hetkit.compression`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from hetkit.compression import (
    Bf16,
    Compression,
    Custom,
    Fp16,
    Int4,
    Int8,
    PowerSGD,
    Threshold,
    TopK,
    parse_compression,
)
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.factors import Factors
from hetkit.worker.codecs.half import Half
from hetkit.worker.codecs.integers import Integers4, Integers8
from hetkit.worker.codecs.plain import Plain
from hetkit.worker.codecs.sparse import Largest, Passing

_NONE: Mapping[str, Callable[[], Codec]] = MappingProxyType({})


def make_codec(compression: str, own: Mapping[str, Callable[[], Codec]] = _NONE) -> Codec:
    """Returns a fresh codec.

    Args:
        compression: Its text, as `hetkit.compression` reads it; checked where it was set.
        own: The task's own codecs by key, for ``"task:key"``.

    Raises:
        SettingsError: The text names no codec.
        KeyError: The task has no codec of that key.

    Example:
        >>> make_codec("bf16").name
        'bf16'
    """
    spec = parse_compression(compression)
    return own[spec.key]() if isinstance(spec, Custom) else _built_in(spec)


def _built_in(spec: Compression) -> Codec:
    match spec:
        case Int8():
            return Integers8(spec)
        case Int4():
            return Integers4(spec)
        case TopK():
            return Largest(spec)
        case Threshold():
            return Passing(spec)
        case PowerSGD():
            return Factors(spec)
        case Fp16():
            return Half(spec.name, torch.float16)
        case Bf16():
            return Half(spec.name, torch.bfloat16)
        case _:
            return Plain()
