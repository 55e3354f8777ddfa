"""An emulated device: real computing, held to the clock of the card it stands for.

Forward ends at t_f, and bucket k becomes ready no earlier than its share of the backward::

    real        ██fwd██          █b0█ █b1█
    emulated    ██fwd████████████|████b0███████|████b1███████|
                                 t_f           hand-over 0   hand-over 1
    link                                       ───b0───▶ ─b1─▶     FIFO: latency + bytes / rate

So overlap, exposed transfer, waiting and the order of buckets behave as on the real thing (the link
is `hetkit.worker.emulated_link`'s). A third of the compute is the forward and two thirds the
backward, the usual ratio of their operations (each matrix product of the forward has two in the
backward).
"""

import random
import time

import torch

from hetkit.devices.device import Device, Emulation

FORWARD_SHARE = 1 / 3
"""Share of a step's compute that the forward pass takes."""

_LATE = 0.1
_LATE_STEPS = 5
"""So many steps running, each late by more than so much of it, are no hiccup of this machine."""


class EmulatedOutOfMemoryError(torch.OutOfMemoryError):
    """The emulated device's memory does not hold what the step needs."""


class DeviceClock:
    """Holds a rank to the pace of its emulated device.

    Args:
        emulation: The device's behaviour; ``sample_s`` must be known by now.
        sample_s: Seconds per sample at pace 1, where ``emulation`` leaves it open.
        rank: Makes the jitter differ between ranks.

    Attributes:
        real_s: Seconds that this machine computed in the step.
        late_s: Seconds by which that was longer than the device's own computing.
        due_s: Seconds of the device's own computing in the step.

    Example:
        >>> clock = DeviceClock(Emulation(pace=2.0, sample_s=0.002), 0.002, rank=0)
        >>> clock.compute_s(samples=10, precision="off", step=0, elapsed_s=0.0)
        0.01
    """

    def __init__(self, emulation: Emulation, sample_s: float, rank: int) -> None:
        self._emulation = emulation
        self._sample_s = sample_s
        self._rank = rank
        self._first_step_at: float | None = None
        self._noise = 1.0
        self._elapsed_s = 0.0
        self._micro_start = 0.0
        self._micro_s = 0.0
        self._late_steps = 0
        self.real_s = self.late_s = self.due_s = 0.0

    @property
    def outpaced(self) -> bool:
        """Whether this machine has not kept up with the device for some steps."""
        return self._late_steps >= _LATE_STEPS

    def compute_s(self, samples: int, precision: str, step: int, elapsed_s: float) -> float:
        """Returns the wall seconds that a micro-batch takes: launch + samples / pace, noise out.

        Nothing is launched for no samples.

        Args:
            samples: Size of the micro-batch.
            precision: ``"off"``, ``"bf16"`` or ``"fp16"``.
            step: The step, counted over the session.
            elapsed_s: Seconds since the first step, which decide on slow-downs.
        """
        if not samples:
            return 0.0
        e = self._emulation
        pace = e.pace * e.amp_pace.get(precision, 1.0)
        for slow_down in e.slow_downs:
            if elapsed_s >= slow_down.at_s:
                pace /= slow_down.factor
        return (e.launch_s + samples * self._sample_s / pace) * e.time_scale

    def begin_step(self, step: int) -> None:
        """Draws the step's noise and starts its account."""
        now = time.monotonic()
        if self._first_step_at is None:
            self._first_step_at = now
        self._elapsed_s = now - self._first_step_at
        self._step = step
        late = self.late_s > _LATE * self.due_s > 0
        self._late_steps = self._late_steps + 1 if late else 0
        self.real_s = self.late_s = self.due_s = 0.0
        e = self._emulation
        if e.jitter:
            draw = random.Random(f"{e.seed}/{self._rank}/{step}").gauss(1.0, e.jitter)
            self._noise = max(0.1, draw)

    def begin_micro_batch(self, samples: int, precision: str) -> None:
        """Starts the clock of one forward and backward."""
        self._micro_start = self._phase_start = time.monotonic()
        self._micro_s = self._noise * self.compute_s(
            samples, precision, self._step, self._elapsed_s
        )

    def excuse(self, seconds: float) -> None:
        """Leaves out what was waited for other ranks in the middle of the computing."""
        self._micro_start += seconds
        self._phase_start += seconds

    def forward_done(self) -> None:
        """Holds until the device's forward has ended."""
        self._hold(FORWARD_SHARE)

    def backward_done(self, share: float) -> None:
        """Holds until ``share`` (0 … 1) of the device's backward has ended."""
        late_s = self._hold(FORWARD_SHARE + (1 - FORWARD_SHARE) * share)
        if share >= 1:
            self.due_s += self._micro_s
            self.late_s += late_s

    def whole_pass(self, began: float, samples: int, precision: str) -> None:
        """Holds until a forward and backward pass of ``samples`` is over that began at ``began``.

        For a loop that calls forward and backward itself: nobody tells when a forward ends.
        """
        self.begin_micro_batch(samples, precision)
        self._micro_start = self._phase_start = began
        self.backward_done(1.0)

    def _hold(self, share: float) -> float:
        """Waits until ``share`` of the micro-batch is due; returns the seconds it came too late."""
        now = time.monotonic()
        self.real_s += now - self._phase_start
        due = self._micro_start + share * self._micro_s
        if due > now:
            time.sleep(due - now)
        self._phase_start = time.monotonic()
        return max(0.0, now - due)


class EmulatedMemory:
    """The emulated device's memory: p + q·μ against its size.

    Args:
        device: The emulated device.
        fixed_bytes: The p: weights, gradients and optimizer state.
        sample_bytes: The q: what one sample of a micro-batch keeps for the backward.
    """

    def __init__(self, device: Device, fixed_bytes: float, sample_bytes: float) -> None:
        self._device = device
        self._fixed_bytes = fixed_bytes
        self._sample_bytes = sample_bytes

    @property
    def size_bytes(self) -> int | None:
        """Size of the memory; None: unlimited."""
        return self._device.emulation.memory_bytes if self._device.emulation else None

    def use(self, micro_batch: int) -> float:
        """Returns the bytes in use with ``micro_batch`` samples in flight.

        Raises:
            EmulatedOutOfMemoryError: It is more than the device has.
        """
        used = self._fixed_bytes + self._sample_bytes * micro_batch
        size = self.size_bytes
        if size is not None and used > size:
            raise EmulatedOutOfMemoryError(
                f"emulated device {self._device.label} has {size / 1e9:.2f} GB, but a micro-batch "
                f"of {micro_batch} samples needs {used / 1e9:.2f} GB: give a smaller micro_batch."
            )
        return used
