"""The codecs by name. A new codec is added here and to `hetkit.compression.COMPRESSIONS`."""

import torch

from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.half import Half
from hetkit.worker.codecs.plain import Plain


def make_codec(name: str) -> Codec:
    """Returns a fresh codec.

    Args:
        name: One of `hetkit.compression.COMPRESSIONS`; they were checked where they were set.
    """
    codecs: dict[str, Codec] = {
        "none": Plain(),
        "fp16": Half("fp16", torch.float16),
        "bf16": Half("bf16", torch.bfloat16),
    }
    return codecs[name]
