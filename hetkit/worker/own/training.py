"""An own loop's training as its rank sees it: plans go in, states come out."""

import copy
from typing import Any

import torch

from hetkit.plan import Plan
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.exchange import Exchange
from hetkit.worker.group import is_peer_loss
from hetkit.worker.own.clock import OwnClock
from hetkit.worker.own.state import OwnState
from hetkit.worker.own.step import OwnStep
from hetkit.worker.switch import CodecSwitch


class OwnTraining:
    """One rank's own loop, seen from outside of it.

    Args:
        state: Where it stands.
        steps: Executes its steps.
        exchange: The gradient exchange; None for a single rank.
        switch: Changes its codec; None likewise.
        clock: The device's clock.
        device: The torch device.
    """

    def __init__(
        self,
        state: OwnState,
        steps: OwnStep,
        exchange: Exchange | None,
        switch: CodecSwitch | None,
        clock: OwnClock,
        device: torch.device,
    ) -> None:
        self.state = state
        self.steps = steps
        self.device = device
        self._exchange = exchange
        self._switch = switch
        self._clock = clock

    @property
    def step(self) -> int:
        """The next step."""
        return self.state.step

    def apply(self, plan: Plan) -> None:
        """Makes ``plan`` the one in force."""
        self.state.plan = plan
        if self._switch is not None:
            self._switch.apply(plan, self.step, self.steps.updates.optimizers)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = plan.tf32
            torch.backends.cudnn.allow_tf32 = plan.tf32

    def flush(self) -> None:
        """Sends the account of the finished steps."""
        self.steps.meter.flush()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: call it on all ranks, at the same step."""
        codec = self._switch.state_dict() if self._switch else None
        return {**self.state.state_dict(), "codec": codec}

    def take_notices(self) -> list[str]:
        """Returns what a person should know of the exchange, once."""
        return self._switch.take_notices() if self._switch else []

    @property
    def codec(self) -> Codec | None:
        """How gradients travel; None for a single rank."""
        return self._exchange.codec if self._exchange else None

    @property
    def exchange_failed(self) -> bool:
        """Whether the exchange failed because another rank is gone or has given up."""
        error = self._exchange.error if self._exchange is not None else None
        return error is not None and is_peer_loss(error)

    @property
    def outpaced(self) -> bool:
        """Whether this machine computes slower than the device that it emulates."""
        return self._clock.outpaced

    def close(self) -> None:
        """Ends the exchange's thread."""
        if self._exchange is not None:
            self._exchange.close()


class OwnView:
    """What a function given to ``session.call`` sees of a rank that runs an own loop.

    Attributes:
        rank, world_size: The rank and their number.
        device: The torch device.
        models: The wrapped models by name; ``model`` is the first.
        optimizers: All of them; ``optimizer`` is the first.
        step, epoch: The next step, and its epoch.
        loss_scale: What fp16 ranks multiply their loss by; the same on all ranks.
        codec: How gradients travel; None for a single rank.
    """

    def __init__(self, training: OwnTraining, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = training.device
        self.models = dict(training.state.models)
        self.model = next(iter(self.models.values()), None)
        self.optimizers = list(training.steps.updates.optimizers)
        self.optimizer = next(iter(self.optimizers), None)
        self.step = training.state.step
        self.epoch = training.state.epoch
        self.loss_scale = training.steps.loss_scale.scale
        self.codec = training.codec


def models_on_cpu(view: OwnView) -> dict[str, torch.nn.Module]:
    """Returns copies of the wrapped models on the CPU."""
    return {name: copy.deepcopy(model).cpu() for name, model in view.models.items()}
