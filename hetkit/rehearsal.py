"""Rehearsal: a few steps of a task on one device, to know what it would do on others."""

import time

from hetkit.devices.fleet import parse_fleet
from hetkit.errors import SessionError, SettingsError
from hetkit.planning.task_profile import TaskProfile
from hetkit.session import Session
from hetkit.settings import check_int
from hetkit.task import Task

STEPS = 10
"""Steps of each of the two sizes of pass."""

_IN_ONE_EPOCH = 6
"""Steps under one plan that are enough to know it; a new epoch begins with a new one."""


def profile(
    task: Task,
    device: object = "auto",
    *,
    batch: int = 64,
    amp: str = "off",
    seed: int = 0,
    timeout_s: float = 600.0,
) -> TaskProfile:
    """Trains a task for a few steps on one device, and returns what was measured of it.

    The steps are made in one pass, and then in four, so that the fixed cost of a pass can be told
    from a sample's. What they train is thrown away.

    Args:
        task: The task.
        device: Where, as in `hetkit.Session`: one device, real or emulated. Default ``"auto"``,
            of several the first.
        batch: Samples in a step, at least 8. Default 64.
        amp: The precision, as in `hetkit.Settings`. Default ``"off"``.
        seed: Of the weights and the order of the samples.
        timeout_s: The longest that it may take. Default 600.

    Returns:
        The profile, for `hetkit.plan_fleet`, or to be saved.

    Raises:
        SettingsError: An argument is out of its range, or the data is too small for the batch.
        TimeoutError: It took too long.
        Exception: What made the training fail.

    Example:
        >>> import torch, hetkit as hk
        >>> task = hk.Task(
        ...     model=lambda: torch.nn.Linear(3, 1),
        ...     data=(torch.randn(640, 3), torch.randn(640, 1)),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ... )
        >>> profile = hk.profile(task, hk.emulate("1xV100", sample_s=0.001), batch=32)
        >>> profile.device, profile.emulated, profile.shapes
        ('V100', True, ((1, 3), (1,)))
    """
    check_int("batch", batch, minimum=8)
    if not isinstance(task, Task):
        raise SettingsError("a profile needs a hetkit.Task: a loop of your own has no one model.")
    devices = parse_fleet(device)[:1]
    ends_at = time.monotonic() + timeout_s
    with Session(task, devices=devices, global_batch=batch, amp=amp, seed=seed) as session:
        for passes in (4, 1):
            session.set(micro_batch=batch // passes)
            _step(session, STEPS, ends_at)
        plan = session.plan
        begun = session.progress.step - plan.first_step if plan else 0
        if begun < _IN_ONE_EPOCH:
            _step(session, _IN_ONE_EPOCH - begun, ends_at)
        return session.profile()


def _step(session: Session, steps: int, ends_at: float) -> None:
    """Makes so many steps and waits for them."""
    until = session.progress.step + steps
    session.step(steps)
    while session.progress.step < until or session.state not in ("paused", "ready"):
        if session.error is not None:
            raise session.error
        if session.state == "closed":
            raise SessionError("the session was closed while it was profiled.")
        if time.monotonic() > ends_at:
            done = session.progress.step
            raise TimeoutError(f"{done} of {until} steps are done: give it more than timeout_s.")
        time.sleep(0.01)
    epoch_steps = session.progress.epoch_steps
    if epoch_steps < _IN_ONE_EPOCH:
        raise SettingsError(
            f"an epoch has {epoch_steps} steps of this batch, and a profile needs "
            f"{_IN_ONE_EPOCH}: give a smaller batch, or more data."
        )
