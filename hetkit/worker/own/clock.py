"""The clock of an own loop: its device's passes held to time, once their length is known.

A task is probed before it trains, so that an emulated device's time per sample can be measured. An
own loop cannot be: nobody but the user's code knows what a pass is. So where the emulation leaves
the time per sample open, the ranks agree on it in the first step, from what that step took.
"""

import time

from hetkit.devices.device import Device
from hetkit.worker.build import CALIBRATION_MARGIN, SHORTEST_STEP_S
from hetkit.worker.emulation import DeviceClock


class OwnClock:
    """Holds the passes of one rank to its emulated device's time; a real device's to nothing.

    Args:
        device: The rank's device.
        rank: The rank.
        share: Samples per rank and step at the even split.

    Example:
        >>> clock = OwnClock(Device(name="cpu", kind="cpu", index=0, key="cpu:0"), 0, share=8)
        >>> clock.begin_step(0)
        >>> clock.end_pass(8, "off")
        >>> clock.fact, clock.real_s
        (0.0, None)
    """

    def __init__(self, device: Device, rank: int, share: int) -> None:
        self._emulation = device.emulation
        self._rank = rank
        self._share = share
        self._step = 0
        self._samples = 0
        self._worked_s = 0.0
        self._clock: DeviceClock | None = None
        if self._emulation is not None and self._emulation.sample_s is not None:
            self._clock = DeviceClock(self._emulation, self._emulation.sample_s, rank)

    def begin_step(self, step: int) -> None:
        """Begins the step's account."""
        self._step, self._samples, self._worked_s = step, 0, 0.0
        if self._clock is not None:
            self._clock.begin_step(step)
        self.begin_pass()

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._pass_began = time.monotonic()

    def end_pass(self, samples: int, precision: str) -> None:
        """A backward pass over ``samples`` has ended here: holds until the device's would have."""
        self._samples += samples
        self._worked_s += time.monotonic() - self._pass_began
        if self._clock is not None:
            self._clock.whole_pass(self._pass_began, samples, precision)
        self.begin_pass()

    @property
    def fact(self) -> float:
        """Seconds per sample at pace 1, where the ranks have still to agree on it; else 0."""
        if self._emulation is None or self._clock is not None or not self._samples:
            return 0.0
        return self._worked_s * self._emulation.pace / self._samples

    def agree(self, facts: list[float], precision: str) -> None:
        """Takes all ranks' facts: from now on the device's time is known, for this step too."""
        if self._emulation is None or self._clock is not None or not any(facts):
            return
        e = self._emulation
        shortest_s = SHORTEST_STEP_S / self._share  # gloo itself costs milliseconds a rank
        sample_s = max(CALIBRATION_MARGIN * max(facts), shortest_s) / e.time_scale
        self._clock = DeviceClock(e, sample_s, self._rank)
        self._clock.begin_step(self._step)
        self._clock.whole_pass(self._pass_began - self._worked_s, self._samples, precision)

    @property
    def real_s(self) -> float | None:
        """Seconds that this machine computed in the step; None for a real device."""
        return self._clock.real_s if self._clock is not None else None

    @property
    def outpaced(self) -> bool:
        """Whether this machine computes slower than the device that it emulates."""
        return self._clock is not None and self._clock.outpaced
