"""The subject: what a session trains, be it a `hetkit.Task` or a loop that the user wrote."""

import copy
import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hetkit.compression import Custom, parse_compression
from hetkit.devices.fleet import Fleet
from hetkit.errors import SettingsError
from hetkit.launch.ends import Link
from hetkit.launch.payload import Payload, dump
from hetkit.planning.schedule import resolve_amp
from hetkit.settings import Settings
from hetkit.task import Task

if TYPE_CHECKING:
    from hetkit.worker.rank import Rank


class Subject(Protocol):
    """What a session trains.

    Attributes:
        entry: What its workers run, as ``module:name``.
        preload: Modules to import once for all workers.
        epochs: How many a run trains, unless it says so itself; None: all there are.
    """

    entry: str
    preload: tuple[str, ...]
    epochs: int | None

    def check(self, settings: Settings, fleet: Fleet) -> None:
        """Checks settings for this subject on these devices; raises `SettingsError`."""

    def dump(self, folder: Path, *, inline: bool) -> Payload:
        """Writes what the workers need into ``folder``."""

    def make_rank(self, link: Link, generation: int) -> "Rank":
        """Returns a rank for this very process."""

    def model(self, save: Callable[[], Path], call: Callable[..., list[Any]], *, ema: bool) -> Any:
        """Returns what was trained, on the CPU, given a session's means to get at it.

        Args:
            save: Has rank 0 write the training state, and returns where.
            call: Runs a function on ranks.
            ema: The average of the weights, not the weights themselves.
        """


def subject_of(task: object) -> Subject:
    """Returns what a session trains.

    Raises:
        SettingsError: It is neither a task nor a function of one argument.
        DataError: The task's data is empty.
    """
    if isinstance(task, Task):
        task.check_data()
        return TaskSubject(task)
    if not callable(task) or isinstance(task, type):
        raise SettingsError(
            f"task must be a hetkit.Task, not {type(task).__name__}; or a training loop of your "
            "own: a function of one argument, the worker."
        )
    try:
        inspect.signature(task).bind(None)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"a training loop is a function of one argument, the worker: {task!r} cannot be called "
            f"so ({error})."
        ) from error
    return LoopSubject(task)


def check_loop(settings: Settings) -> None:
    """Checks what a loop of the user's own cannot do.

    Raises:
        SettingsError: Local steps are asked for.
    """
    if settings.sync_every > 1:
        raise SettingsError(
            f"sync_every is {settings.sync_every}, and a loop of your own exchanges in every step: "
            "leave it at 1, or give a hetkit.Task."
        )


def check_codec(settings: Settings, keys: Collection[str]) -> None:
    """Checks that a codec of the task's own is there.

    Args:
        settings: They name it, as ``"task:key"``, or another codec.
        keys: Those that there are.

    Raises:
        SettingsError: It is not.
    """
    spec = parse_compression(settings.compression)
    if isinstance(spec, Custom) and spec.key not in keys:
        there = f"it has {', '.join(map(repr, keys))}" if keys else "it has none"
        raise SettingsError(
            f"compression is {settings.compression!r}, and the task has no codec {spec.key!r}: "
            f"{there}. Give hetkit.Task(codecs={{{spec.key!r}: …}}), or another codec."
        )


class TaskSubject:
    """A task.

    Args:
        task: The user's.
    """

    entry = "hetkit.worker.rank:run"
    epochs: int | None = 1

    def __init__(self, task: Task) -> None:
        self.preload = task.preload
        self._task = task

    def check(self, settings: Settings, fleet: Fleet) -> None:
        """Checks settings for these devices; raises `SettingsError`."""
        settings.check_ranks(len(fleet))
        resolve_amp(settings, fleet)
        check_codec(settings, self._task.codecs)

    def dump(self, folder: Path, *, inline: bool) -> Payload:
        """Writes the task into ``folder``."""
        # A DataLoader's processes would be forked from this very one: inline, the rank loads.
        return dump(replace(self._task, num_workers=0) if inline else self._task, folder)

    def make_rank(self, link: Link, generation: int) -> "Rank":
        """Returns a rank for this very process."""
        from hetkit.worker.rank import Rank

        return Rank(link, generation, 0)

    def model(self, save: Callable[[], Path], call: Callable[..., list[Any]], *, ema: bool) -> Any:
        """Returns the trained model, built here and filled with the saved state."""
        import torch

        if ema and self._task.ema is None:
            raise SettingsError("the task keeps no average of the weights: give Task(ema=0.999).")
        path = save()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        finally:
            path.unlink(missing_ok=True)
        with torch.random.fork_rng(devices=[]):
            made = self._task.model
            # A module is the task's own, with its initial weights: it must stay what it is.
            given = isinstance(made, torch.nn.Module)
            model: torch.nn.Module = copy.deepcopy(made) if given else made()
        model.load_state_dict(state["model"])
        if ema:
            model.load_state_dict(state["average"]["parameters"], strict=False)
        return model


class LoopSubject:
    """A training loop of the user's own.

    Args:
        function: Takes the worker.
    """

    entry = "hetkit.worker.own.rank:run"
    preload: tuple[str, ...] = ()
    epochs: int | None = None

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def check(self, settings: Settings, fleet: Fleet) -> None:
        """Checks settings for these devices; raises `SettingsError`."""
        settings.check_ranks(len(fleet))
        resolve_amp(settings, fleet)
        check_loop(settings)
        check_codec(settings, ())

    def dump(self, folder: Path, *, inline: bool) -> Payload:
        """Writes the function into ``folder``."""
        return dump(self._function, folder, "loop")

    def make_rank(self, link: Link, generation: int) -> "Rank":
        """Returns a rank for this very process."""
        from hetkit.worker.own.rank import OwnRank

        return OwnRank(link, generation, 0)

    def model(self, save: Callable[[], Path], call: Callable[..., list[Any]], *, ema: bool) -> Any:
        """Returns the model that the loop wrapped, or all of them by name, from rank 0."""
        if ema:
            raise SettingsError("hetkit keeps no average of the weights for a loop of your own.")
        from hetkit.worker.own.training import models_on_cpu

        (models,) = call(models_on_cpu, ranks=[0])
        return next(iter(models.values())) if len(models) == 1 else models
