"""The state of an own loop: where it stands, and what a checkpoint keeps of it."""

from typing import Any

import torch

from hetkit.errors import TaskError
from hetkit.plan import Plan
from hetkit.worker.own.step import OwnStep


class OwnState:
    """Where an own loop stands, and all that it wants kept.

    Args:
        step: Has the optimizers and the loss scale.
        snapshot: The state to go on from; None for a fresh start.

    Attributes:
        models: The wrapped models by name, in order.
        plan: The plan in force; None before the first.
        step, epoch, epoch_first_step: The next step, its epoch, and that epoch's first step.
        samples: Samples in an epoch; None before it is known.
    """

    def __init__(self, step: OwnStep, snapshot: dict[str, Any] | None) -> None:
        self.models: dict[str, torch.nn.Module] = {}
        self.plan: Plan | None = None
        self.samples: int | None = None
        self._step = step
        self._snapshot = snapshot
        self._kept: dict[str, Any] = {}
        place = snapshot or {"step": 0, "epoch": 0, "epoch_first_step": 0}
        self.step: int = place["step"]
        self.epoch: int = place["epoch"]
        self.epoch_first_step: int = place["epoch_first_step"]

    @property
    def epoch_done(self) -> bool:
        """Whether all steps of the present epoch were executed."""
        plan = self.plan
        return plan is not None and plan.epoch == self.epoch and self.step > plan.last_step

    def end_epoch(self) -> None:
        """The epoch is closed."""
        self.epoch += 1
        self.epoch_first_step = self.step

    def add_model(self, name: str, model: torch.nn.Module) -> None:
        """Keeps a model.

        Raises:
            TaskError: The name is taken.
        """
        if name in self.models:
            raise TaskError(f"a model named {name!r} is wrapped already: give it another name.")
        self.models[name] = model

    def add(self, name: str, thing: Any) -> None:
        """Keeps something else that has a state.

        Raises:
            TaskError: The name is taken, or it has none.
        """
        if name in self._kept:
            raise TaskError(f"{name!r} is kept already: give it another name.")
        if not all(
            callable(getattr(thing, each, None)) for each in ("state_dict", "load_state_dict")
        ):
            raise TaskError(
                f"{name} of type {type(thing).__name__} cannot be kept: it needs state_dict() and "
                "load_state_dict()."
            )
        self._kept[name] = thing

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "epoch_first_step": self.epoch_first_step,
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": [each.state_dict() for each in self._step.updates.optimizers],
            "kept": {name: thing.state_dict() for name, thing in self._kept.items()},
            "loss_scale": self._step.loss_scale.state_dict(),
            "first_batch": self._step.updates.first_batch,
        }

    def restore(self) -> None:
        """Takes the snapshot's state in, once; all models and optimizers must be there by now.

        Raises:
            TaskError: The loop has other models, optimizers or kept things than the snapshot.
        """
        state, self._snapshot = self._snapshot, None
        if state is None:
            return
        optimizers = self._step.updates.optimizers
        mine = sorted(self.models), len(optimizers), sorted(self._kept)
        there = (
            sorted(state.get("models", {})),
            len(state.get("optimizers", [])),
            sorted(state.get("kept", {})),
        )
        if mine != there:
            raise TaskError(
                f"the loop has models {mine[0]}, {mine[1]} optimizers and keeps {mine[2]}, the "
                f"checkpoint has {there[0]}, {there[1]} and {there[2]}: wrap and keep everything "
                "before worker.epochs(…), as when it was saved."
            )
        for name, model in self.models.items():
            model.load_state_dict(state["models"][name])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, thing in self._kept.items():
            thing.load_state_dict(state["kept"][name])
        self._step.loss_scale.load_state_dict(state["loss_scale"])
        self._step.updates.first_batch = state["first_batch"]
