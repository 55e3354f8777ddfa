"""Outlook: what a session's next steps would take, from what its steps have taken."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetkit.access import Access
from hetkit.compression import Custom, parse_compression
from hetkit.devices.device import Device
from hetkit.devices.fleet import Fleet
from hetkit.errors import SessionError
from hetkit.plan import Plan
from hetkit.planning.batch_split import split_batch
from hetkit.planning.buckets import BucketProposal, propose_buckets
from hetkit.planning.comparison import WhatIf, compare
from hetkit.planning.guidance import Guidance, guide
from hetkit.planning.precision_gain import faster, precision_gains
from hetkit.planning.schedule import Position, describe_changes, make_plan
from hetkit.planning.situation import AS_IT_IS, Situation
from hetkit.planning.task_profile import TaskProfile
from hetkit.planning.what_if import predict
from hetkit.records.forecast import DROPPED_STEPS, LEAST_STEPS, Forecast
from hetkit.records.trial import Trial
from hetkit.settings import Settings

_MOVES_THE_SPLIT = ("batches", "micro_batch", "amp", "tf32", "global_batch")
_AT_HAND = ("ready", "paused", "running")
_NO_TIME = ("lr", "lr_rule", "guard_every", "compression_warmup", "outer_momentum")


class Outlook(Access):
    """Access that also predicts."""

    def what_if(self, **changes: Any) -> WhatIf:
        """Returns what a step would take with other settings, beside what it takes now.

        Nothing is changed. The first time that a codec is asked for, it is tried on the workers
        where they stand next, which takes about as long as ten of its exchanges; after that, the
        answer is there at once.

        Args:
            **changes: Fields of `hetkit.Settings`, as for `Session.set`.

        Returns:
            A table, in text and in a notebook.

        Raises:
            SettingsError: A name or a value is wrong.
            SessionError: Too few steps have been measured yet under the present settings.
        """
        wanted = self.settings.change(**changes)
        self._subject.check(wanted, self._in_use(self.ranks))
        now = self._situation()
        costs, tensor_bytes = self._tried(now, wanted)
        now = self._situation()  # with the link as the trial found it
        plan = _plan_for(now, wanted, asked=changes)
        prediction = predict(now, plan, costs=costs, tensor_bytes=tensor_bytes)
        silent = [f"{name} does not change the step's time" for name in _NO_TIME if name in changes]
        if wanted.clip_norm is not None and "clip_norm" in changes:
            silent.append("clip_norm: one pass over the gradient, which is not predicted")
        prediction = replace(prediction, notes=(*prediction.notes, *silent))
        return compare(
            now,
            prediction,
            changes=describe_changes(self.applied or self.settings, wanted),
            costs=costs,
            tensor_bytes=tensor_bytes,
        )

    def propose_bucket_bytes(self) -> BucketProposal:
        """Returns the size of gradient buckets with which least of the exchange would show.

        Every size is played through with the measured times at which gradients are ready, and the
        link as it was fitted; `set` it with ``bucket_bytes=proposal.best.bucket_bytes``.

        Raises:
            SessionError: Too few steps have been measured yet, or nothing is exchanged.
        """
        now = self._situation()
        costs, tensor_bytes = self._tried(now, self.applied or self.settings)
        now = self._situation()
        if now.link is None:
            raise SessionError("a single device exchanges nothing, so no bucket size is better.")
        rows = zip(now.ranks, now.plan.batches, now.plan.micro_batches, strict=True)
        return propose_buckets(
            tensor_bytes or now.bucket_bytes,
            [rank.model.seconds(batch, micro) for rank, batch, micro in rows],
            now.link,
            present_bytes=now.plan.bucket_bytes,
            seen_shares=now.seen_shares,
            cost=costs.get(now.plan.compression, AS_IT_IS),
            element_bytes=now.element_bytes,
        )

    def guidance(self) -> Guidance:
        """Returns until when each device pays, and what a further one would bring.

        Raises:
            SessionError: Too few steps have been measured yet.
        """
        now = self._situation()
        rest_s = now.parts.data_s + now.parts.optimizer_s + now.parts.other_s
        return guide(
            [device.name for device in now.devices],
            [rank.model for rank in now.ranks],
            now.plan.global_batch,
            micro_batches=now.plan.micro_batches,
            exchange_s=self._coordinator.scales.exchange_s,
            rest_s=max(0.0, rest_s),
            emulated=now.emulated,
        )

    def profile(self) -> TaskProfile:
        """Returns what was measured of the task here, for `hetkit.plan_fleet` and for a file.

        It is that of the device that computes longest. The gradient's tensors are looked up on the
        workers, where they stand next.

        Raises:
            SessionError: Too few steps have been measured yet, or the task is a loop of your own.
        """
        now = self._situation()
        found = self._find(now, ())
        latest = self.history.latest
        peaks = [rank.memory_peak_bytes for rank in latest.ranks] if latest else []
        return TaskProfile.of(now, found, peaks, self._coordinator.scales.forecast.costs)

    # ── inside ──

    def _in_use(self, places: Sequence[int]) -> Fleet:
        return Fleet(tuple(self._fleet[place] for place in places))

    def _situation(self) -> Situation:
        found: list[Situation | None] = []
        coordinator = self._coordinator
        coordinator.ask(lambda: found.append(coordinator.scales.situation()))
        if found[0] is None:
            more = DROPPED_STEPS + LEAST_STEPS
            raise SessionError(
                "too few steps have been measured under the present settings to predict from: "
                f"run() or step({more + 2}) first; the first {DROPPED_STEPS} after a change do not "
                "count."
            )
        return found[0]

    def _tried(self, now: Situation, wanted: Settings) -> tuple[Any, tuple[float, ...]]:
        """Returns codec costs and tensor sizes; tries on the workers what is not known yet."""
        forecast: Forecast = self._coordinator.scales.forecast
        names = dict.fromkeys((now.plan.compression, wanted.compression))
        unknown = tuple(
            name
            for name in names
            if name not in forecast.costs and not isinstance(parse_compression(name), Custom)
        )
        tried = bool(forecast.tensor_bytes)
        wanting = now.plan.world_size > 1 and not (tried and not unknown)
        if wanting and self._subject.epochs is not None and self.state in _AT_HAND:
            trial = self._find(now, unknown, with_link=not tried)
            self._coordinator.ask(lambda: forecast.learn(trial))
        return dict(forecast.costs), forecast.tensor_bytes

    def _find(
        self, now: Situation, compressions: tuple[str, ...], *, with_link: bool = True
    ) -> Trial:
        """Tries codecs, and the link if asked, on all workers where they stand next."""
        from hetkit.worker.trial import Trial as Function

        if self._subject.epochs is None:
            raise SessionError(
                "a loop of your own has no one model to try a codec on: give a hetkit.Task."
            )
        function = Function(
            compressions=compressions,
            devices=now.devices,
            bucket_bytes=now.plan.bucket_bytes,
            with_link=with_link,
        )
        return Trial.of(self.call(function))


def _plan_for(now: Situation, wanted: Settings, asked: dict[str, Any]) -> Plan:
    """Returns the plan that would follow from ``wanted``, with the split that would be made."""
    plan = now.plan
    position = Position(
        epoch=max(plan.epoch, wanted.compression_warmup),
        step=plan.epoch_first_step,
        epoch_first_step=plan.epoch_first_step,
        samples=plan.epoch_steps * plan.global_batch,
    )
    caps = [micro if micro < plan.global_batch else None for micro in plan.micro_batches]
    if wanted.micro_batch != asked.get("micro_batch", wanted.micro_batch):
        caps = [None] * plan.world_size
    made = make_plan(
        wanted,
        now.devices,
        position,
        version=plan.version + 1,
        balanced=plan.batches,
        micro_caps=caps,
        reason="what if",
    )
    if wanted.batches == "auto" and any(name in asked for name in _MOVES_THE_SPLIT):
        return replace(made, batches=_balanced(now, made, now.devices))
    return made


def _balanced(now: Situation, plan: Plan, devices: Sequence[Device]) -> tuple[int, ...]:
    gains = precision_gains(devices, now.plan, plan)
    rows = zip(now.ranks, gains, now.plan.batches, now.plan.micro_batches, strict=True)
    models = [faster(rank.model, gain.likely, batch, micro) for rank, gain, batch, micro in rows]
    return split_batch(
        models, plan.global_batch, micro_batches=plan.micro_batches, floors=[1] * len(models)
    )
