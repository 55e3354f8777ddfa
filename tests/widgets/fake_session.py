"""FakeSession: a session that feeds synthetic steps, for the widgets' tests and for a look at them.

It follows the same rules as the real one: settings are validated, batches take effect at once, the
rest at the next epoch, and a call that does not fit the state raises.
"""

import random
import threading
from dataclasses import dataclass, field
from typing import Any

from hetkit.devices.device import Device, Emulation
from hetkit.errors import SessionError
from hetkit.plan import Plan
from hetkit.planning.comparison import WhatIf
from hetkit.planning.situation import Parts
from hetkit.planning.what_if import Prediction
from hetkit.records.history import Event, History, RankStep, StepRecord
from hetkit.records.ledger import Ledger, LedgerRow, summarise_epoch
from hetkit.settings import Settings
from hetkit.widgets.batches import apportion

GIB = 2**30
KINDS = (("A100", 2.3, 40 * GIB), ("V100", 1.0, 16 * GIB), ("3090", 1.6, 24 * GIB))
EPOCH_STEPS = 40


def fake_devices(count: int) -> tuple[Device, ...]:
    made = []
    for index in range(count):
        name, pace, memory = KINDS[index % len(KINDS)]
        made.append(
            Device(
                name=name,
                kind="cpu",
                index=index,
                key=f"fake:{index}",
                memory_bytes=memory,
                emulation=Emulation(pace=pace, memory_bytes=memory),
            )
        )
    return tuple(made)


@dataclass(frozen=True, kw_only=True)
class FakeProgress:
    epoch: int
    epochs_target: int
    step: int
    epoch_first_step: int
    epoch_steps: int
    eta_s: float | None
    samples_per_s: float | None


@dataclass
class FakeOutput:
    lines: dict[int, str] = field(default_factory=dict)

    def tail(self, rank: int, lines: int) -> str:
        return "\n".join(self.lines.get(rank, "").splitlines()[-lines:])


class FakeSession:
    def __init__(self, devices: int = 2, *, sample_s: float = 0.0004, seed: int = 0) -> None:
        self.devices = fake_devices(devices)
        self.ranks = tuple(range(devices))
        labels = [device.label for device in self.devices]
        self.history = History(labels=labels, emulated=[True] * devices)
        self.ledger = Ledger(labels=labels)
        self.settings = Settings(batches="even", global_batch=256)
        self.applied: Settings | None = None
        self.state = "ready"
        self.plan: Plan | None = None
        self.error: BaseException | None = None
        self.output = FakeOutput()
        self.calls: list[tuple[str, Any]] = []
        self.dashboard: object = None
        self._sample_s = sample_s
        self._random = random.Random(seed)
        self._time_s = 0.0
        self._step = 0
        self._target = 0
        self._records: list[StepRecord] = []
        self._stop = threading.Event()
        self._going = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def progress(self) -> FakeProgress:
        epoch, rest = divmod(self._step, EPOCH_STEPS)
        step_s = self.history.latest.step_s if self.history.latest else None
        left = self._target * EPOCH_STEPS - self._step
        return FakeProgress(
            epoch=epoch,
            epochs_target=self._target,
            step=self._step,
            epoch_first_step=self._step - rest,
            epoch_steps=EPOCH_STEPS,
            eta_s=left * step_s if step_s and self.state == "running" else None,
            samples_per_s=self.history.latest.samples_per_s if self.history.latest else None,
        )

    def run(self, epochs: int) -> None:
        self.calls.append(("run", epochs))
        if self.state not in ("new", "ready"):
            raise SessionError(f"the session is {self.state}: run() needs one that is ready.")
        self._target = self.progress.epoch + epochs
        self.state = "running"
        self._stop.clear()
        self._going.set()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self.calls.append(("pause", None))
        self._going.clear()
        self.state = "paused"

    def resume(self) -> None:
        self.calls.append(("resume", None))
        self.state = "running"
        self._going.set()

    def step(self, n: int = 1) -> None:
        self.calls.append(("step", n))
        for _ in range(n):
            self.advance()

    def stop(self) -> None:
        self.calls.append(("stop", None))
        self._stop.set()
        self._going.set()
        self.state = "ready"

    def set(self, **changes: Any) -> None:
        self.calls.append(("set", changes))
        wanted = self.settings.change(**changes)
        wanted.check_ranks(len(self.devices))
        self.settings = wanted

    def what_if(self, **changes: Any) -> WhatIf:
        self.calls.append(("what_if", changes))
        if self.plan is None:
            raise SessionError("too few steps have been measured.")
        self.settings.change(**changes)
        rest = {"data_s": 0.002, "wait_s": 0.0, "codec_s": 0.0, "optimizer_s": 0.002}
        now = Parts(compute_s=0.06, transfer_s=0.036, other_s=0.0, **rest)
        new = Parts(compute_s=0.06, transfer_s=0.016, other_s=0.0, **rest)
        return WhatIf(
            changes=(),
            now=now,
            samples_per_s=self.plan.global_batch / now.step_s,
            prediction=Prediction(plan=self.plan, parts=new, low_s=0.075, high_s=0.085),
            emulated=True,
        )

    def close(self) -> None:
        self._stop.set()
        self._going.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self.state = "closed"

    def advance(self, steps: int = 1) -> None:
        """Does synthetic steps at once, on the calling thread."""
        for _ in range(steps):
            self._begin()
            record = self._record(self.plan)
            self._time_s = record.time_s
            self._step += 1
            self._records.append(record)
            self.history.append(record)
            if self._step % EPOCH_STEPS == 0:
                self._end_epoch()

    def _train(self) -> None:
        while not self._stop.is_set() and self._step < self._target * EPOCH_STEPS:
            if not self._going.wait(0.1):
                continue
            self.advance()
            self._stop.wait(self._records[-1].step_s if self._records else 0.01)
        if self.state == "running":
            self.state = "ready"

    def _begin(self) -> None:
        new_epoch = self._step % EPOCH_STEPS == 0
        applied = self.applied or self.settings
        applied = self.settings if new_epoch else applied.change(batches=self.settings.batches)
        if self.applied is not None and applied != self.applied:
            self._mark("settings", f"amp {applied.amp}, batches {applied.batches}")
        if new_epoch or applied != self.applied:
            self.plan = self._make_plan(applied)
        self.applied = applied

    def _make_plan(self, settings: Settings) -> Plan:
        weights = {
            "even": [1.0] * len(self.devices),
            "auto": [d.emulation.pace for d in self.devices],
        }
        asked = settings.batches
        batches = apportion(
            weights[asked] if isinstance(asked, str) else asked, settings.global_batch
        )
        first = self._step - self._step % EPOCH_STEPS
        amp = settings.amp if isinstance(settings.amp, tuple) else (settings.amp,) * len(batches)
        return Plan(
            version=1,
            epoch=self._step // EPOCH_STEPS,
            first_step=self._step,
            epoch_first_step=first,
            epoch_steps=EPOCH_STEPS,
            global_batch=settings.global_batch,
            batches=batches,
            micro_batches=tuple(max(1, b) for b in batches),
            amp=tuple("fp16" if mode == "auto" else mode for mode in amp),
            compression=settings.compression,
            lr=settings.lr if isinstance(settings.lr, float) else None,
            bucket_bytes=settings.bucket_bytes,
            sync_every=settings.sync_every,
            reason=str(asked),
        )

    def _record(self, plan: Plan) -> StepRecord:
        faster = 1.0 if plan.amp[0] == "off" else 1.8
        noise = [self._random.gauss(1, 0.02) for _ in plan.batches]
        compute = [
            batch * self._sample_s / device.emulation.pace / faster * n
            for batch, device, n in zip(plan.batches, self.devices, noise, strict=True)
        ]
        transfer = 0.012 if plan.compression == "none" else 0.006
        longest = max(compute)
        step_s = longest + transfer + 0.006
        loss = 2.3 / (1 + 0.02 * self._step) + self._random.gauss(0, 0.02)
        rows = tuple(
            RankStep(
                step=self._step,
                epoch=plan.epoch,
                rank=rank,
                time_s=self._time_s + step_s,
                batch=batch,
                step_s=step_s,
                data_s=0.002,
                compute_s=compute[rank],
                wait_s=longest - compute[rank],
                transfer_s=transfer,
                codec_s=0.0 if plan.compression == "none" else 0.001,
                optimizer_s=0.002,
                other_s=0.002 if plan.compression == "none" else 0.001,
                overlapped_s=0.004,
                wire_bytes=1e6,
                memory_bytes=None if rank == 2 else 1.2 * GIB + batch * 4e7,
                memory_peak_bytes=None if rank == 2 else 1.4 * GIB + batch * 4e7,
                loss=loss,
            )
            for rank, batch in enumerate(plan.batches)
        )
        return StepRecord(
            step=self._step,
            epoch=plan.epoch,
            time_s=self._time_s + step_s,
            samples=sum(plan.batches),
            loss=loss,
            skipped=False,
            lr=0.001 if plan.lr is None else plan.lr,
            guard_cosine=None if plan.compression == "none" or self._step % 10 else 0.95,
            guard_error=None if plan.compression == "none" or self._step % 10 else 0.3,
            ranks=rows,
        )

    def _mark(self, kind: str, text: str) -> None:
        epoch = self._step // EPOCH_STEPS
        self.history.add_event(
            Event(step=self._step, epoch=epoch, time_s=self._time_s, kind=kind, text=text)
        )

    def _end_epoch(self) -> None:
        summary = summarise_epoch(self._records)
        self._records = []
        self.ledger.add(
            LedgerRow.of(
                summary,
                self.plan,
                metrics={"accuracy": min(0.98, 0.5 + 0.05 * len(self.ledger))},
                emulated=True,
            )
        )
