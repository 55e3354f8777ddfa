"""The codecs by name. A new codec is added here and to `hetkit.compression`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from hetkit.compression import Compression, Custom, parse_compression
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.half import Half
from hetkit.worker.codecs.plain import Plain

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
    makers: dict[str, Callable[[], Codec]] = {
        "none": Plain,
        "fp16": lambda: Half("fp16", torch.float16),
        "bf16": lambda: Half("bf16", torch.bfloat16),
    }
    return makers[spec.name]()
