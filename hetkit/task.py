"""Task: what is trained, as callables, so that it can be built inside every worker."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetkit.errors import DataError, SettingsError, TaskError


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is trained: a model, its data, a loss and an optimizer.

    Every part is built inside the workers, so classes, functions, lambdas and modules defined in
    notebook cells or in files beside the notebook all work. No torch object is needed to describe
    a task.

    Args:
        model: A callable that returns the ``torch.nn.Module`` (a class does), or a module, whose
            weights are then the initial ones. It is built under the session's seed.
        data: The training set: a map-style dataset (``__len__`` and ``__getitem__``), a tensor or
            array, a tuple of them with equal first dimensions, or a callable without arguments
            that returns one of these (for data that a worker should open by itself).
        loss: ``loss(model, batch)``; returns the mean over the batch's samples as a scalar tensor,
            or ``(mean, count)`` when its denominator is something else (tokens, valid pixels).
        optimizer: ``optimizer(parameters)``; returns the ``torch.optim.Optimizer``.
        validate: The validation set, in the forms of ``data``; None for none. It is spread over
            the devices, each sample counted once.
        metrics: Name to ``metric(model, batch)``, which returns the batch's mean, or
            ``(mean, count)``. Measured on ``validate`` after each epoch, beside its loss.
        scheduler: ``scheduler(optimizer)``; its ``step()`` is called once an epoch. None for none.
        collate: Turns a list of samples into a batch; None for PyTorch's ``default_collate``.
        num_workers: DataLoader processes per rank. 0 (the default) loads in the rank itself.
        preload: Names of heavy modules that the workers' parent should import once for all.

    A task equals only itself: whether two data sets are equal is not a question to ask in passing.

    Raises:
        TaskError: A part is not callable, metrics are given without ``validate`` or are no
            mapping, or ``preload`` is not a list of names.
        SettingsError: ``num_workers`` is negative.

    Example:
        >>> import hetkit as hk
        >>> task = hk.Task(
        ...     model=lambda: __import__("torch").nn.Linear(2, 1),
        ...     data=[(0.0, 1.0)] * 8,
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     optimizer=lambda params: __import__("torch").optim.SGD(params, lr=0.1),
        ... )
        >>> task.num_workers
        0
    """

    model: Any
    data: Any = field(repr=False)
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    validate: Any = field(default=None, repr=False)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    scheduler: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            _require_callable(name, getattr(self, name))
        for name in ("scheduler", "collate"):
            if getattr(self, name) is not None:
                _require_callable(name, getattr(self, name))
        if not isinstance(self.metrics, Mapping):
            raise TaskError(f"metrics must map names to callables, not {self.metrics!r}.")
        for name, metric in self.metrics.items():
            _require_callable(f"metrics[{name!r}]", metric)
        if self.data is None:
            raise TaskError("data is None: give a dataset, tensors, or a callable that makes one.")
        if self.metrics and self.validate is None:
            raise TaskError(
                f"metrics {list(self.metrics)} need data to be measured on: "
                "give validate=… or leave metrics out."
            )
        if isinstance(self.num_workers, bool) or not isinstance(self.num_workers, int):
            raise SettingsError(f"num_workers must be an int of at least 0: {self.num_workers!r}.")
        if self.num_workers < 0:
            raise SettingsError(f"num_workers must be at least 0, not {self.num_workers}.")
        object.__setattr__(self, "preload", _module_names(self.preload))

    def check_data(self) -> None:
        """Checks what can be known of the data without opening it.

        Raises:
            DataError: A set is empty, or its parts differ in length.
        """
        _check_data("data", self.data)
        _check_data("validate", self.validate)


def _module_names(preload: object) -> tuple[str, ...]:
    names = preload if isinstance(preload, Iterable) and not isinstance(preload, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TaskError(
            f'preload must be a list of module names, such as ["transformers"]: {preload!r}.'
        )
    return tuple(names)


def _check_data(name: str, data: Any) -> None:
    if isinstance(data, tuple) and data and all(hasattr(part, "shape") for part in data):
        lengths = sorted({len(part) for part in data if len(part.shape)})
        if len(lengths) > 1:
            raise DataError(f"the parts of {name} differ in length: {lengths}.")
        data = data[0]
    scalar = hasattr(data, "shape") and not len(data.shape)
    if hasattr(data, "__len__") and not isinstance(data, type) and not scalar and len(data) == 0:
        raise DataError(f"{name} has no samples.")


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TaskError(
            f"{name} must be callable, not {value!r} of type {type(value).__name__}: "
            "give a class, a function or a lambda."
        )
