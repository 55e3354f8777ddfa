"""Seats: which devices of a fleet train now, and the claims on them.

A device keeps its place in the fleet, by which the history and the ledger name it; its rank is its
place among those in use::

    fleet    A100 #0   V100 #1   V100 #2
    place       0         1         2
    in use      ✓         –         ✓          after drop("V100 #1")
    rank        0                   1
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from hetkit.devices.busy import Claim, claim
from hetkit.devices.fleet import Fleet
from hetkit.errors import SettingsError
from hetkit.settings import Settings


class Seats:
    """The devices of a session that are in use, and its claims. Safe to use from any thread.

    Args:
        fleet: All devices that the session may use.
        owner: What messages call the session.

    Attributes:
        places: Those in use, or about to be, by their place in the fleet, in rank order.

    Example:
        >>> import hetkit as hk
        >>> seats = Seats(hk.emulate("2xT4"), "mine")
        >>> seats.claim([0, 1])
        >>> seats.places = (0,)
        >>> seats.tidy()        # the second is free for others
        >>> seats.close()
    """

    def __init__(self, fleet: Fleet, owner: str) -> None:
        self.places = tuple(range(len(fleet)))
        self._fleet = fleet
        self._owner = owner
        self._claims: dict[int, Claim] = {}
        self._lock = threading.Lock()

    @property
    def claimed(self) -> bool:
        """Whether any device is claimed, as from the first run on."""
        return bool(self._claims)

    def claim(self, places: Iterable[int]) -> None:
        """Claims those devices that have to be and are not yet: all of them, or none.

        Raises:
            DeviceBusyError: Another session trains on one of them.
        """
        new: dict[int, Claim] = {}
        with self._lock:
            try:
                for place in places:
                    device = self._fleet[place]
                    shared = device.emulated or device.kind == "cuda"
                    if shared and place not in self._claims:
                        new[place] = claim([device], self._owner)
            except BaseException:
                for each in new.values():
                    each.close()
                raise
            self._claims |= new

    def tidy(self) -> None:
        """Frees the devices that are not in use."""
        with self._lock:
            for place in [place for place in self._claims if place not in self.places]:
                self._claims.pop(place).close()

    def close(self) -> None:
        """Frees all devices. Closing twice is fine."""
        with self._lock:
            for each in self._claims.values():
                each.close()
            self._claims = {}


def choose(fleet: Fleet, wanted: object) -> tuple[int, ...]:
    """Returns the places of the devices that a person means, in the fleet's order.

    Args:
        fleet: What there is to choose from.
        wanted: Places, from 0, or labels.

    Raises:
        SettingsError: There is no such device, or ``wanted`` is no list.

    Example:
        >>> import hetkit as hk
        >>> choose(hk.emulate("A100 + 2xV100"), ["V100 #2", 0])
        (0, 2)
    """
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise SettingsError(f'give a list of devices, such as [0, "{fleet.labels[0]}"]: {wanted!r}')
    return tuple(sorted({_place(fleet, each) for each in wanted}))


def _place(fleet: Fleet, wanted: object) -> int:
    if isinstance(wanted, str) and wanted in fleet.labels:
        return fleet.labels.index(wanted)
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted in range(len(fleet)):
        return wanted
    raise SettingsError(
        f"there is no device {wanted!r}: give a place from 0 to {len(fleet) - 1} or one of "
        f"{', '.join(fleet.labels)}."
    )


def follow_devices(
    settings: Settings,
    before: Sequence[int],
    after: Sequence[int],
    otherwise: Settings | None = None,
) -> Settings:
    """Returns the settings for other devices: one value per rank stays with its device.

    Samples per rank become ratios, since they no longer sum to the global batch. Islands lose the
    devices that go.

    Args:
        settings: For the devices at the places ``before``.
        before: Places in the fleet, in rank order.
        after: The places of the devices to come.
        otherwise: Has what takes the place of a list that cannot follow. Default: it is refused.

    Raises:
        SettingsError: A list has no value for one of ``after``, or no samples are left.

    Example:
        >>> follow_devices(Settings(global_batch=16, batches=[10, 4, 2]), (0, 1, 2), (0, 2)).batches
        (10.0, 2.0)
    """
    changes: dict[str, Any] = {}
    for name in ("batches", "amp"):
        values = getattr(settings, name)
        if not isinstance(values, tuple):
            continue
        missing = [place for place in after if place not in before]
        kept = [values[before.index(place)] for place in after if place in before]
        if not missing and (name == "amp" or any(kept)):
            changes[name] = [float(value) for value in kept] if name == "batches" else kept
        elif otherwise is None:
            why = f"no value for device {missing[0]}" if missing else "no samples for the others"
            raise SettingsError(
                f'{name}={list(values)} has {why}: set({name}="auto") first, then change the '
                "devices."
            )
        else:
            of_same_batch = name == "amp" or otherwise.global_batch == settings.global_batch
            changes[name] = getattr(otherwise, name) if of_same_batch else "even"
    if isinstance(settings.hierarchy, tuple):
        changes["hierarchy"] = _islands(settings.hierarchy, before, after)
    return settings.change(**changes) if changes else settings


def _islands(
    islands: Sequence[Sequence[int]], before: Sequence[int], after: Sequence[int]
) -> str | list[list[int]]:
    """Returns the islands without the devices that go; where one comes, those of the hosts."""
    places = [[before[rank] for rank in island if before[rank] in after] for island in islands]
    kept = [[after.index(place) for place in island] for island in places if island]
    return kept if sum(map(len, kept)) == len(after) else "auto"
