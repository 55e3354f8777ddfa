"""Task: what is trained, as callables, so that it can be built inside every worker."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from hetkit.compression import Custom
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
            array, a tuple of them with equal first dimensions, a stream (an
            ``IterableDataset``, or another object that can be iterated again and again), or a
            callable without arguments that returns one of these (for data that a worker should
            open by itself; a generator function does for a stream).
        loss: ``loss(model, batch)``; returns the mean over the batch's samples as a scalar tensor,
            or ``(mean, count)`` when its denominator is something else (tokens, valid pixels); a
            batch with count 0 adds nothing. A loss has one denominator: divide the sums of all its
            terms by the same count.
        reduction: ``"mean"`` (default); or ``"sum"``: the loss returns the batch's sum, and a
            step's gradient is that of the sum over all its samples, so it grows with the global
            batch. What is shown is the mean over the samples.
        optimizer: ``optimizer(parameters)``; returns the ``torch.optim.Optimizer``.
        validate: The validation set, in the forms of ``data``; None for none. It is spread over
            the devices, each sample counted once.
        metrics: Name to ``metric(model, batch)``, which returns the batch's mean, or
            ``(mean, count)``. Measured on ``validate`` after each epoch, beside its loss.
        parameters: ``parameters(model)``; returns what ``optimizer`` is given: parameters, or
            groups of them with learning rates of their own, as ``torch.optim`` takes them. None:
            ``model.parameters()``.
        scheduler: ``scheduler(optimizer)``; its ``step()`` is called without arguments. It goes on
            from the task's own rates, whatever ``session.set(lr=…)`` puts in force meanwhile. None
            for none.
        scheduler_per: When: once an ``"epoch"`` (default), or for each ``"step"`` that the
            optimizer makes; a step that all ranks skip (an overflow) does not count.
        ema: Decay d of an average of the weights, a ← d·a + (1 − d)·w after each step, for
            ``session.model(ema=True)``; None (default) for none. Validation measures both: the
            average's figures are named ``ema_…``. Buffers are the model's own.
        sync_batchnorm: BatchNorm layers take their statistics over the samples of all devices
            (default), as one process on the whole batch does: the split then changes nothing. Each
            costs two small exchanges a step, which hold the devices together layer by layer, and
            every call of the loss must run the same layers. Where ``micro_batch`` or a device's
            memory cuts the step, the statistics are those of its rounds, the micro-batches that
            the devices run side by side. False: of each device's own micro-batch, as in plain DDP;
            the running ones are then shared by the busiest device at the end of an epoch.
        find_unused_parameters: Whether some batches leave parameters without a gradient that others
            give one. None (default): only if the first samples do. True costs a look through the
            graph in each step; such a parameter then gets no update when no device used it.
        collate: Turns a list of samples into a batch; None for PyTorch's ``default_collate``.
        sampler: What gives an epoch's order: a ``torch.utils.data.Sampler``, another iterable of
            indices, or ``sampler(dataset, generator)``, which returns one. None (the default): a
            new permutation each epoch. It is drawn by rank 0 and shared; the session's seed and the
            epoch fix what is random in it. It must draw the same number each epoch.
        epoch_samples: Samples that an epoch takes from a stream or a sampler; None (the default):
            as many as it has. Only for these two.
        num_workers: DataLoader processes per rank. 0 (the default) loads in the rank itself; at
            most 1 for a stream.
        pin_memory: Load into pinned memory, from which a GPU takes it faster. Default False; on
            CPUs it changes nothing.
        seed_samples: Seed Python's, NumPy's and PyTorch's global random numbers for each sample,
            by the session's seed, the epoch and the sample's index, so that random augmentation in
            ``dataset[index]`` does not depend on the split or on who loads it. Default True, for
            about 10 µs a sample; samples are then asked for one by one. False: quicker where
            nothing is random, and datasets with ``__getitems__`` give a whole batch at once.
        preload: Names of heavy modules that the workers' parent should import once for all.
        codecs: Gradient codecs of your own: name to a callable that makes one, for
            ``compression="task:name"``. `hetkit.worker.codecs.codec` says what a codec is.

    What is random in ``collate`` depends on which samples a micro-batch has, so on the split; and a
    generator that the dataset keeps for itself (``numpy.random.default_rng()``) is not seeded. What
    is random in the model or the loss (dropout) is seeded by the session's seed, the step and the
    rank: the same plan gives the same run again, another split another, equally valid, one.

    Every rank reads a stream from its beginning on, once an epoch, and keeps its own samples: it
    must give the same on all ranks, so do not shard it. ``set_epoch(epoch)`` is called where it has
    that, and what it draws from the global random numbers is fixed by seed and epoch. What is dear
    and concerns one sample alone belongs in ``collate``, which sees only what the rank keeps.

    A task equals only itself: whether two data sets are equal is not a question to ask in passing.

    Raises:
        TaskError: A part is not callable, metrics are given without ``validate``, ``metrics`` or
            ``codecs`` is no mapping, ``preload`` no list of names, or ``sampler`` does not fit
            ``data``.
        SettingsError: ``num_workers`` is negative, or another number or switch is out of range.

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
    reduction: str = "mean"
    optimizer: Callable[[Any], Any]
    validate: Any = field(default=None, repr=False)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    parameters: Callable[[Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    scheduler_per: str = "epoch"
    ema: float | None = None
    sync_batchnorm: bool = True
    find_unused_parameters: bool | None = None
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Any = field(default=None, repr=False)
    epoch_samples: int | None = None
    num_workers: int = 0
    pin_memory: bool = False
    seed_samples: bool = True
    preload: tuple[str, ...] = ()
    codecs: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            _require_callable(name, getattr(self, name))
        _refuse_criterion(self.loss)
        for name in ("parameters", "scheduler", "collate"):
            if getattr(self, name) is not None:
                _require_callable(name, getattr(self, name))
        for kind in ("metrics", "codecs"):
            given = getattr(self, kind)
            if not isinstance(given, Mapping):
                raise TaskError(f"{kind} must map names to callables, not {given!r}.")
            for name, each in given.items():
                _require_callable(f"{kind}[{name!r}]", each)
        for name in self.codecs:
            Custom(name)
        if self.data is None:
            raise TaskError("data is None: give a dataset, tensors, or a callable that makes one.")
        if self.metrics and self.validate is None:
            raise TaskError(
                f"metrics {list(self.metrics)} need data to be measured on: "
                "give validate=… or leave metrics out."
            )
        if self.reduction not in ("mean", "sum"):
            raise SettingsError(f'reduction must be "mean" or "sum", not {self.reduction!r}.')
        _require_count("num_workers", self.num_workers, at_least=0)
        if self.epoch_samples is not None:
            _require_count("epoch_samples", self.epoch_samples, at_least=1)
        for name in ("pin_memory", "seed_samples"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        self._check_order()
        if self.scheduler_per not in ("epoch", "step"):
            raise SettingsError(
                f'scheduler_per must be "epoch" or "step", not {self.scheduler_per!r}.'
            )
        if self.ema is not None and not _is_decay(self.ema):
            raise SettingsError(
                f"ema must be None or a decay from 0 to below 1, such as 0.999, not {self.ema!r}."
            )
        for name in ("sync_batchnorm", "find_unused_parameters"):
            allowed = (True, False, None) if name == "find_unused_parameters" else (True, False)
            if getattr(self, name) not in allowed:
                raise SettingsError(
                    f"{name} must be {', '.join(map(str, allowed))}: {getattr(self, name)!r}."
                )
        object.__setattr__(self, "preload", _module_names(self.preload))

    def check_data(self) -> None:
        """Checks what can be known of the data without opening it.

        Raises:
            DataError: A set is empty, or its parts differ in length.
        """
        _check_data("data", self.data)
        _check_data("validate", self.validate)

    def _check_order(self) -> None:
        sampler = self.sampler
        if sampler is None:
            return
        if isinstance(sampler, type) or not (callable(sampler) or hasattr(sampler, "__iter__")):
            raise TaskError(
                f"sampler must be a Sampler object or sampler(dataset, generator), not {sampler!r}."
            )
        if is_stream(self.data):
            raise TaskError(
                "a stream is read in its own order: leave sampler out, or shuffle in the stream."
            )


def is_stream(data: object) -> bool:
    """Whether ``data`` can only be read from its beginning on.

    Example:
        >>> is_stream(iter([1])), is_stream([1])
        (True, False)
    """
    # PyTorch's IterableDataset inherits a __getitem__ that only raises.
    iterable = any(each.__name__ == "IterableDataset" for each in type(data).__mro__)
    return iterable or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _require_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SettingsError(f"{name} must be an int of at least {at_least}, not {value!r}.")


def _module_names(preload: object) -> tuple[str, ...]:
    names = preload if isinstance(preload, Iterable) and not isinstance(preload, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TaskError(
            f'preload must be a list of module names, such as ["transformers"]: {preload!r}.'
        )
    return tuple(names)


def _check_data(name: str, data: Any) -> None:
    if is_stream(data):  # its length may be a promise that it breaks
        return
    if isinstance(data, tuple) and data and all(hasattr(part, "shape") for part in data):
        lengths = sorted({len(part) for part in data if len(part.shape)})
        if len(lengths) > 1:
            raise DataError(f"the parts of {name} differ in length: {lengths}.")
        data = data[0]
    scalar = hasattr(data, "shape") and not len(data.shape)
    if hasattr(data, "__len__") and not isinstance(data, type) and not scalar and len(data) == 0:
        raise DataError(f"{name} has no samples.")


def _is_decay(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _refuse_criterion(loss: object) -> None:
    """Refuses PyTorch's own losses as they are: they get (output, target), not (model, batch)."""
    home = loss.__module__ if isinstance(loss, FunctionType) else type(loss).__module__
    if home in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TaskError(
            f"a task's loss gets (model, batch), but {name} gets (output, target): wrap it, as in "
            "loss=lambda model, batch: criterion(model(batch[0]), batch[1])."
        )


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TaskError(
            f"{name} must be callable, not {value!r} of type {type(value).__name__}: "
            "give a class, a function or a lambda."
        )
