"""The own loop: training code that the user wrote, executed by the plans and grants of a session.

::

    def train(worker):                                       what the worker does
        model = worker.wrap(Net())                           rank 0's weights on every rank
        optimizer = worker.optimizer(torch.optim.AdamW(…))   exchange before each of its steps
        for epoch in worker.epochs(10):                      snapshot, report
            for batch in worker.batches(train_set):          wait for the grant; plan; data
                with worker.step():                          time split, autocast, update
                    worker.backward(loss(model, batch), count=len(batch[0]))

What is split-invariant is what a step does with its gradients: for the same samples every split
gives the same update, to rounding. What the user's code draws at random inside a step is seeded by
the step *and the rank*, so it is reproducible for the same plan, and differs between splits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hetkit.errors import DataError, TaskError
from hetkit.plan import Plan
from hetkit.planning.batch_split import even_split
from hetkit.worker.data import open_samples
from hetkit.worker.group import share_tensors
from hetkit.worker.out_of_memory import is_out_of_memory
from hetkit.worker.own.batches import Batches, cut
from hetkit.worker.own.evaluation import Totals, measure_share
from hetkit.worker.own.gradients import SAMPLES
from hetkit.worker.own.meeting import Act
from hetkit.worker.own.state import OwnState
from hetkit.worker.own.step import OwnStep


class Turns(Protocol):
    """What tells a loop how far it may go: the rank, which hears the coordinator."""

    def ready(self, samples: int, epochs: int) -> None:
        """Tells the coordinator what an epoch has, and how many there are."""

    def await_step(self) -> Plan:
        """Waits until the next step is granted; returns the plan in force for it."""

    def await_epoch_end(self) -> None:
        """Waits until the epoch may be closed, and closes it."""


class Worker:
    """What an own loop sees of its rank, and by which it is led.

    Attributes:
        rank, world_size: The rank and their number.
        device: The torch device; wrapped models and batches are there.
        steps_done: Steps that were executed, over the whole session.
        ledger, history: As of a session, on rank 0 of a script (`hetkit.worker`); else None.

    Example:
        >>> import hetkit as hk
        >>> data = torch.ones(8, 2), torch.zeros(8, 1)
        >>> def train(worker):
        ...     model = worker.wrap(torch.nn.Linear(2, 1))
        ...     worker.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for epoch in worker.epochs(2):
        ...         for inputs, targets in worker.batches(data):
        ...             with worker.step():
        ...                 loss = (model(inputs) - targets).square().mean()
        ...                 worker.backward(loss, count=len(inputs))
        >>> with hk.Session(train, devices="inline", global_batch=4) as session:
        ...     session.run()
        ...     len(session.ledger), type(session.model()).__name__
        (2, 'Linear')
    """

    def __init__(
        self,
        turns: Turns,
        step: OwnStep,
        state: OwnState,
        *,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.ledger: Any = None
        self.history: Any = None
        self._turns = turns
        self._step = step
        self._state = state
        self._seed = seed
        self._batches: Batches | None = None
        self._epochs: int | None = None
        self._totals = Totals()

    # ── what is trained ──

    def wrap(self, model: torch.nn.Module, name: str = "") -> torch.nn.Module:
        """Returns the model on the rank's device, with rank 0's weights; it stays the same object.

        BatchNorm layers in it see the rank's own samples, as with plain DDP, and at an epoch's end
        all ranks take the buffers of the one with the most samples.

        Args:
            model: What is trained; a loop may wrap several.
            name: By which `hetkit.Session.model` and checkpoints know it; default: its number.

        Raises:
            TaskError: It is no module, the name is taken, or the ranks wrap different things.
        """
        if not isinstance(model, torch.nn.Module):
            raise TaskError(f"worker.wrap() takes a torch.nn.Module, not {type(model).__name__}.")
        number = len(self._state.models)
        self._state.add_model(name or f"model{number}", model.to(self.device))
        tensors = [*model.parameters(), *model.buffers()]
        elements = sum(tensor.numel() for tensor in tensors)
        facts = self._step.meeting.meet(
            self.steps_done, Act.WRAP, number, float(len(tensors)), float(elements)
        )
        if len(set(facts)) > 1:
            raise TaskError(f"the ranks wrap models of different sizes as number {number}.")
        if self.world_size > 1:
            share_tensors(tensors, 0)
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the very optimizer, which from now on sums its gradients before it steps.

        Every optimizer steps at the end of `step` by itself. As soon as the loop calls ``step()``
        of one, as a GAN does, all of them are the loop's own to step, inside ``worker.step()``,
        and gradients are kept until then, or until its ``zero_grad()``. A step whose gradient is
        not finite is skipped, by this optimizer on all ranks. ``clip_norm`` is a limit on each
        optimizer's own gradient. ``lr`` of `hetkit.Settings` holds for the step only, so a
        scheduler of the loop goes on with its own rates.

        Raises:
            TaskError: It is no optimizer, or shares a parameter with another.
        """
        self._step.updates.take(optimizer)
        return optimizer

    def keep(self, **things: Any) -> None:
        """Has checkpoints keep more: schedulers, anything with ``state_dict``/``load_state_dict``.

        What is random needs no keeping: it is seeded in each step.

        Raises:
            TaskError: One has no such methods, or its name is taken.
        """
        for name, thing in things.items():
            self._state.add(name, thing)

    # ── how far ──

    @property
    def steps_done(self) -> int:
        """Steps that were executed, over the whole session."""
        return self._state.step

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left of ``count``, from where training stands.

        At the end of each, the ranks report and rank 0 keeps the state for a recovery. Break out
        to end early, on all ranks in the same step.

        Raises:
            TaskError: ``count`` is no int of at least 1, or differs from an earlier call's.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise TaskError(f"worker.epochs() takes an int of at least 1, not {count!r}.")
        if self._epochs not in (None, count):
            raise TaskError(f"worker.epochs({self._epochs}) was said before: say all at once.")
        self._epochs = count
        self._state.restore()
        while self._state.epoch < count:
            yield self._state.epoch
            self._end_epoch()

    def batches(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        seed_samples: bool = True,
    ) -> Iterator[Any]:
        """Yields this rank's part of each step of an epoch, once the step is granted.

        Which samples a step has depends on the seed and the epoch alone; how many of them are this
        rank's is the plan's. A rank may have none in a step: its batch is then empty (first
        dimension 0), and its loop does the same as all others', with a count of 0.

        Args:
            data: The training set, in the forms that `hetkit.Task` takes, the same in each epoch.
            collate: Turns a list of samples into a batch; None for PyTorch's own.
            sampler: As in `hetkit.Task`.
            num_workers: DataLoader processes per rank.
            pin_memory: As in PyTorch's DataLoader.
            seed_samples: As in `hetkit.Task`.

        Raises:
            TaskError: It is not inside ``worker.epochs``, or a batch was passed over.
            DataError: The data is empty, or its length has changed.
        """
        if self._epochs is None:
            raise TaskError("worker.batches() belongs inside `for epoch in worker.epochs(…):`.")
        if self._batches is None or self._batches.source is not data:
            self._batches = Batches(
                data,
                rank=self.rank,
                seed=self._seed,
                device=self.device,
                alone=self.world_size == 1,
                collate=collate,
                sampler=sampler,
                num_workers=num_workers,
                pin_memory=pin_memory,
                seed_samples=seed_samples,
            )
        epoch, there = self._state.epoch, self._batches.available
        facts = self._step.meeting.meet(self.steps_done, Act.EPOCH, epoch, float(there))
        if len(set(facts)) > 1:
            raise DataError(f"the ranks have training sets of different sizes: {facts}.")
        self._announce(self._batches.begin_epoch(epoch))
        while not self._state.epoch_done:
            yield self._next_batch(self._batches)
            if self._step.waits:
                raise TaskError(
                    f"the batch of step {self.steps_done} was passed over: use each in a "
                    "`with worker.step():`, or break out of worker.epochs() to end."
                )

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yields the batch in pieces of at most the plan's micro-batch, for accumulation.

        Pieces are cut along the first dimension of the batch's tensors. Give `backward` each
        piece's own count.

        Raises:
            DataError: The batch has nothing that can be cut.
            TaskError: It is not inside ``worker.step()``.
        """
        size = self._step.piece
        places = list(self._step.pieces())
        if len(places) < 2:
            yield batch
            return
        for start, stop in self._step.pieces():
            yield cut(batch, start, stop, size=size)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: forward and backward passes inside, in the rank's precision.

        At its end the optimizers step, and the step is counted and accounted for. The exchange
        does not overlap with the backward pass, as that of a `hetkit.Task` does.

        Raises:
            TaskError: There is no batch for it, or the ranks do different things.
        """
        self._step.begin(self._seed)
        try:
            yield
        except BaseException as error:
            self._step.abandon()
            if is_out_of_memory(error):
                pieces = "take the batch by worker.micro_batches(batch)"
                error.add_note(f"In a loop of your own, {pieces} and give a smaller micro_batch.")
            raise
        self._step.finish()
        self._state.step += 1

    def backward(
        self, loss: Any, *, count: Any, of: str = SAMPLES, retain_graph: bool = False
    ) -> None:
        """Adds the gradient of ``loss``, weighted so that the sum over all ranks is the whole's.

        May be called several times in a step: for each piece of the batch, and for each of several
        losses, which then add up. With ``count=0`` the loss may be anything: it is not looked at.

        Args:
            loss: A scalar tensor, the mean over ``count`` things.
            count: How many, such as ``len(batch[0])``.
            of: What is counted. Means over ``"samples"`` (default) count each sample of the batch
                once in each loss. Any other name has a denominator of its own: the sum of its
                counts over calls and ranks, since the optimizer's last step or ``zero_grad()``.
            retain_graph: As in PyTorch's ``backward``.

        Raises:
            LossError: The loss is not a scalar with a gradient, or not finite in the first step.
            TaskError: It is not inside ``worker.step()``.
        """
        self._step.backward(loss, count, of, retain_graph)

    # ── beside ──

    def evaluate(
        self,
        data: Any,
        metrics: Mapping[str, Callable[[Any, Any], Any]],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Measures metrics over all samples, spread over the ranks, each counted once.

        In float32 and without gradients; the wrapped models are in ``eval`` mode meanwhile. The
        ledger shows them too, when this is called between two epochs' steps.

        Args:
            data: In the forms that `hetkit.Task` takes.
            metrics: Name to ``metric(model, batch)``, which returns the batch's mean, or ``(mean,
                count)``; the model is the first that was wrapped.
            collate: As in `batches`.

        Returns:
            Name to the mean over all ranks, the same on each.

        Raises:
            TaskError: It was called inside a step, or not on all ranks.
        """
        if self._step.waits:
            raise TaskError("worker.evaluate() belongs between two steps.")
        samples = open_samples(data, collate, seed=self._seed)
        plan = self._state.plan
        batches = plan.batches if plan else even_split(self.world_size, self.world_size)
        measured = measure_share(
            list(self._state.models.values()),
            metrics,
            samples,
            rank=self.rank,
            batches=batches,
            largest=plan.micro_batches[self.rank] if plan else 256,
            device=self.device,
        )
        self._totals.add(measured)
        self._step.meeting.meet(self.steps_done, Act.EVALUATE, 0, float(len(metrics)))
        flat = self._step.meeting.totals([each for pair in measured.values() for each in pair])
        sums, counts = flat[::2], flat[1::2]
        return {
            name: total / count if count else float("nan")
            for name, total, count in zip(measured, sums, counts, strict=True)
        }

    def log(self, **values: float) -> None:
        """Has the ledger show values in the epoch's row: the mean of the ranks that gave one."""
        self._totals.add({name: (float(value), 1.0) for name, value in values.items()})

    def take_totals(self) -> dict[str, tuple[float, float]]:
        """Returns what was measured and logged in the epoch, as this rank's ``(sum, count)``."""
        totals, self._totals = self._totals, Totals()
        return totals.pairs

    # ── inside ──

    def finish(self) -> None:
        """The loop has come to its end: on all ranks in the same step.

        Raises:
            TaskError: It made no step, or other ranks go on.
        """
        if self._batches is None:
            raise TaskError("the loop never asked for worker.batches(…): there is nothing to do.")
        if self._step.waits:
            raise TaskError(f"the batch of step {self.steps_done} was taken, and not used.")
        self._step.meeting.meet(self.steps_done, Act.END)
        if self._state.epoch_done:
            self._turns.await_epoch_end()

    def _announce(self, samples: int) -> None:
        if self._state.samples is None:
            self._state.samples = samples
            self._turns.ready(samples, self._epochs or 1)
        elif self._state.samples != samples:
            raise DataError(
                f"the training set has {samples} samples, and {self._state.samples} in the epoch "
                "before: all epochs of a loop must have as many."
            )

    def _next_batch(self, batches: Batches) -> Any:
        plan = self._turns.await_step()
        shares = batches.shares(plan, self.steps_done)
        self._step.prepare(plan, self.steps_done, share=shares[self.rank], planned=sum(shares))
        with self._step.meter.data():
            return batches.next(plan, self.steps_done)

    def _end_epoch(self) -> None:
        if not self._state.epoch_done:
            raise TaskError(
                f"epoch {self._state.epoch} was left in step {self.steps_done}, before its end: "
                "take all batches of worker.batches(…), or break out of worker.epochs() to end."
            )
        self._turns.await_epoch_end()
