"""Devices by name: ``"auto"``, ``"cpu*2"``, ``"cuda:0 + cuda:1"``, and lists of these."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hetkit.devices.device import Device
from hetkit.devices.emulated import MOST_DEVICES
from hetkit.devices.host import read_host
from hetkit.devices.real import cuda_devices, why_no_cuda
from hetkit.errors import DeviceError

ALLOWED = '"auto", "cpu", "cpu*2", "cuda:0, cuda:1", "cuda:0 + cpu*2", or hk.emulate("2xA100")'
"""What can name devices, for error messages."""


def named_devices(devices: object) -> tuple[Device, ...]:
    """Returns the devices that a person means; see `hetkit.devices.fleet.parse_fleet`.

    Raises:
        DeviceError: No such device, or a wrong count.

    Example:
        >>> from hetkit.devices.named import named_devices
        >>> [device.key for device in named_devices("cpu*2")]
        ['cpu:0', 'cpu:1']
    """
    word = devices.strip().lower() if isinstance(devices, str) else ""
    if word == "auto":
        return cuda_devices() or _cpus(1, taken=())
    if word == "inline":
        return (replace(_cpus(1, taken=())[0], key=f"inline:{os.getpid()}"),)
    if isinstance(devices, (str, Device)):
        return _seat(_words(devices))
    if isinstance(devices, Iterable) and not isinstance(devices, (bytes, Mapping)):
        return _seat([word for item in devices for word in _words(item)])
    raise DeviceError(f"devices cannot be {devices!r}; allowed are {ALLOWED}.")


def _words(item: object) -> list[Device | str]:
    """Returns the devices of one item, with "cpu" and "cuda:<n>" for those still to be found."""
    if isinstance(item, Device):
        return [item]
    if isinstance(item, Sequence) and item and all(isinstance(part, Device) for part in item):
        return list(item)
    if not isinstance(item, str):
        raise DeviceError(f"{item!r} is not a device; allowed are {ALLOWED}.")
    return [word for term in re.split(r"[,+]", item) for word in _term(term, item)]


def _term(term: str, whole: str) -> list[Device | str]:
    word = "".join(term.lower().split())
    many = re.fullmatch(r"cpu[*×x]([0-9]+)|([0-9]+)[*×x]cpu", word)
    if many:
        digits = many[1] or many[2]
        if len(digits) > 4 or not 1 <= int(digits) <= MOST_DEVICES:
            raise DeviceError(f"{term.strip()!r}: a count must be from 1 to {MOST_DEVICES}.")
        return ["cpu"] * int(digits)
    if word == "cuda":
        return [f"cuda:{device.index}" for device in cuda_devices()] or ["cuda:0"]
    if word == "cpu" or re.fullmatch(r"cuda:[0-9]{1,4}", word):
        return ["cpu" if word == "cpu" else f"cuda:{int(word[5:])}"]
    hint = ""
    if re.match(r"[0-9]+[*×x]", word):
        hint = f" An emulated device is never taken by accident: say hk.emulate({whole!r})."
    raise DeviceError(f"there is no device {term.strip()!r}; allowed are {ALLOWED}.{hint}")


def _seat(words: Sequence[Device | str]) -> tuple[Device, ...]:
    """Replaces each word by its device, and gives emulated devices of several fleets new places."""
    given = [word for word in words if isinstance(word, Device)]
    cpus = iter(_cpus(words.count("cpu"), taken=[d.index for d in given if d.name == "cpu"]))
    cards = {d.torch_device: d for d in cuda_devices()} if _asks_cuda(words) else {}
    seated = [
        word if isinstance(word, Device) else next(cpus) if word == "cpu" else _card(word, cards)
        for word in words
    ]
    if len({device.label for device in seated}) < len({device.key for device in seated}):
        seated = [replace(d, index=i) if d.emulated else d for i, d in enumerate(seated)]
    return tuple(seated)


def _asks_cuda(words: Sequence[Device | str]) -> bool:
    return any(isinstance(word, str) and word.startswith("cuda") for word in words)


def _card(word: str, cards: Mapping[str, Device]) -> Device:
    if word in cards:
        return cards[word]
    there = f"there are {', '.join(cards)}" if cards else why_no_cuda()
    raise DeviceError(
        f'there is no device {word!r}: {there}. Train on "cpu", or emulate cards with '
        f'hk.emulate("2xA100").'
    )


def _cpus(count: int, *, taken: Sequence[int]) -> tuple[Device, ...]:
    """Returns CPU devices with the lowest free numbers; together they have the host's memory."""
    if count == 0:
        return ()
    free = [i for i in range(count + len(taken)) if i not in taken][:count]
    memory = read_host().usable_bytes
    share = None if memory is None else memory // (count + len(taken))
    return tuple(
        Device(name="cpu", kind="cpu", index=i, key=f"cpu:{i}", memory_bytes=share) for i in free
    )
