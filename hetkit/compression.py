"""Compression: which gradient codec, with which parameters, as data and as text.

A codec is named in settings, plans, ledger rows and checkpoints by its text, which says all that
differs from its defaults; the classes here are that text with checked parameters::

    "none"  "fp16"  "bf16"  "int8"  "topk(ratio=0.05)"  "powersgd(rank=4)"  "task:mine"

How a codec works is in `hetkit.worker.codecs`, what it sends in `hetkit.planning.codec_bytes`.
A codec of the user's own is ``"task:name"``, where ``Task(codecs={"name": make})`` makes it.
"""

import ast
import math
import re
from dataclasses import dataclass, field, fields

from hetkit.errors import SettingsError


@dataclass(frozen=True)
class Compression:
    """A gradient codec and its parameters; its ``str`` is the text that names it.

    Example:
        >>> str(TopK(ratio=0.01)), str(TopK())
        ('topk(ratio=0.01)', 'topk')
    """

    @property
    def name(self) -> str:
        """The codec's name, without its parameters."""
        return type(self).__name__.lower()

    def __str__(self) -> str:
        given = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        words = [f"{name}={value!r}" for name, default, value in given if value != default]
        return f"{self.name}({', '.join(words)})" if words else self.name


@dataclass(frozen=True)
class Uncompressed(Compression):
    """The gradient as it is.

    Example:
        >>> str(Uncompressed())
        'none'
    """

    @property
    def name(self) -> str:
        """``"none"``."""
        return "none"


@dataclass(frozen=True)
class Fp16(Compression):
    """Half of the bytes: IEEE half precision.

    Example:
        >>> str(Fp16())
        'fp16'
    """


@dataclass(frozen=True)
class Bf16(Compression):
    """Half of the bytes: bfloat16, with float32's range.

    Example:
        >>> str(Bf16())
        'bf16'
    """


@dataclass(frozen=True)
class Selective(Compression):
    """A codec that leaves small parameters as they are: few bytes, and much of the accuracy.

    Args:
        small_bytes: Parameters below this size, and all of one dimension (biases, norms), travel
            as they are, in the same message. 0 compresses whatever can be. Default 4,096.

    Example:
        >>> str(Int8(small_bytes=0))
        'int8(small_bytes=0)'
    """

    small_bytes: int = field(default=4096, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_int(self, "small_bytes", 0, 2**40)


@dataclass(frozen=True)
class Int8(Selective):
    """A quarter of the bytes: 8-bit integers with one float32 scale per block.

    Args:
        block: Elements that share a scale, 16 to 65,536. Default 1,024.

    Example:
        >>> Int8().block
        1024
    """

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(self, "block", 16, 65_536)


@dataclass(frozen=True)
class Int4(Selective):
    """An eighth of the bytes: 4-bit integers, rounded stochastically, one scale per block.

    Args:
        block: Elements that share a scale, 16 to 65,536. Default 1,024.

    Example:
        >>> str(Int4(block=256))
        'int4(block=256)'
    """

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(self, "block", 16, 65_536)


@dataclass(frozen=True)
class TopK(Selective):
    """Only the largest elements travel; the rest waits as error feedback.

    Args:
        ratio: Share of the elements that travels, in (0, 1]. Default 0.05.

    Example:
        >>> TopK(0.01)
        TopK(ratio=0.01)
    """

    ratio: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio(self, "ratio")


@dataclass(frozen=True)
class Threshold(Selective):
    """Elements above a threshold travel, found on a sample: cheaper than top-k, about as many.

    Args:
        ratio: Share of the elements that is aimed at, in (0, 1]. Default 0.05.

    Example:
        >>> str(Threshold(0.1))
        'threshold(ratio=0.1)'
    """

    ratio: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio(self, "ratio")


@dataclass(frozen=True)
class PowerSGD(Selective):
    """Matrices travel as a product of two thin ones (Vogels et al. 2019), with error feedback.

    Args:
        rank: Columns of the thin matrices, 1 to 256. Default 2.

    Example:
        >>> str(PowerSGD(4))
        'powersgd(rank=4)'
    """

    rank: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(self, "rank", 1, 256)


@dataclass(frozen=True)
class Custom(Compression):
    """A codec of the task's own.

    Args:
        key: Its key in ``Task(codecs={...})``.

    Example:
        >>> str(Custom("mine"))
        'task:mine'
    """

    key: str

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not re.fullmatch(r"\w+", self.key):
            raise SettingsError(f"a codec's key is a word, as in 'task:mine': {self.key!r}.")

    def __str__(self) -> str:
        return f"task:{self.key}"


_KINDS: tuple[type[Compression], ...] = (
    Uncompressed,
    Fp16,
    Bf16,
    Int8,
    Int4,
    TopK,
    Threshold,
    PowerSGD,
)

COMPRESSIONS = ("none", *(kind.__name__.lower() for kind in _KINDS[1:]))
"""The built-in codecs by name."""


def parse_compression(given: object) -> Compression:
    """Returns the codec that a text, or one of this module's objects, stands for.

    Raises:
        SettingsError: It names no codec, or a parameter is unknown or out of its range.

    Example:
        >>> parse_compression("bf16"), parse_compression(TopK(0.1))
        (Bf16(), TopK(ratio=0.1))
    """
    if isinstance(given, Compression):
        return given
    text = given.strip() if isinstance(given, str) else ""
    if text.startswith("task:"):
        return Custom(text.removeprefix("task:"))
    found = re.fullmatch(r"(\w+)\s*(\([^()]*\))?", text)
    kind = dict(zip(COMPRESSIONS, _KINDS, strict=True)).get(found[1].lower()) if found else None
    if found is None or kind is None:
        raise SettingsError(
            f"compression must be one of {', '.join(COMPRESSIONS)}, one with parameters such as "
            f"'topk(ratio=0.05)' or hk.TopK(0.05), or 'task:name', not {given!r}."
        )
    arguments, keywords = _arguments(text) if found[2] else ([], {})
    try:
        return kind(*arguments, **keywords)
    except TypeError as error:
        takes = ", ".join(f.name for f in fields(kind)) or "no parameters"
        raise SettingsError(f"{text!r} cannot be read: {found[1]} takes {takes}.") from error


def _arguments(text: str) -> tuple[list[object], dict[str, object]]:
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("no call")
        arguments = [ast.literal_eval(each) for each in call.args]
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise SettingsError(
            f"{text!r} cannot be read: write it as 'topk(ratio=0.05)', with plain numbers."
        ) from error
    return arguments, keywords


def _check_int(spec: Compression, name: str, least: int, most: int) -> None:
    value = getattr(spec, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingsError(
            f"{spec.name}'s {name} must be an int from {least} to {most}, not {value!r}."
        )


def _check_ratio(spec: Compression, name: str) -> None:
    value = getattr(spec, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= 1:
        raise SettingsError(
            f"{spec.name}'s {name} must be a number above 0 and at most 1, not {value!r}."
        )
