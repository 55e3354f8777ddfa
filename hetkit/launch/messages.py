"""The messages between the coordinator and its workers: typed data, never pickle.

A worker's life in messages::

    worker                       coordinator
      │ ── Hello ─────────────────▶ │   after it has connected
      │ ◀───────────────── Join ─── │   who it is, what it trains
      │ ── StoreReady (rank 0) ───▶ │
      │ ◀─────────── Rendezvous ─── │   where the process group meets
      │ ── Ready ─────────────────▶ │   the task is built, the group stands
      │ ◀────────── SetPlan, Grant ─│   in the same order to every rank
      │ ── Progress … ────────────▶ │   ten times a second at most
      │ ◀─────────────── EndEpoch ──│   follows the epoch's last grant
      │ ── EpochReport ───────────▶ │
      │ ◀────────────────── Leave ──│

An own loop sends `Ready` when it first asks for data, and `Finished` when it has returned.
`Failed`, `Notice`, `SaveState`/`Saved` and `Call`/`Answer` can come between any two of these. The
fields named ``pickled`` hold cloudpickle bytes: they are opened only because the channel that
brought them is authenticated.
"""

from typing import Any

import msgspec

from hetkit.devices.device import Device
from hetkit.errors import ProtocolError
from hetkit.plan import Plan
from hetkit.planning.time_split import Stamps

PROTOCOL = 1
"""Version of these messages; both sides must have the same."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message; the wire form is msgpack with the class's name as its tag."""


class Hello(Message, frozen=True, kw_only=True):
    """A worker has connected."""

    rank: int
    generation: int
    pid: int
    protocol: int = PROTOCOL
    torch_version: str = ""
    python_version: str = ""


class Join(Message, frozen=True, kw_only=True):
    """Who the worker is and what it trains."""

    rank: int
    world_size: int
    generation: int
    backend: str
    devices: tuple[Device, ...]
    payload: str
    seed: int
    global_batch: int
    threads: int
    snapshot: str | None = None


class StoreReady(Message, frozen=True, kw_only=True):
    """Rank 0 hosts the rendezvous store."""

    generation: int
    port: int


class Rendezvous(Message, frozen=True, kw_only=True):
    """Where the process group meets."""

    generation: int
    host: str
    port: int


class Ready(Message, frozen=True, kw_only=True):
    """The rank has built its task and stands in the process group.

    ``epochs`` is how many an own loop has; None for a task, which has no end of its own.
    """

    rank: int
    generation: int
    samples: int
    step: int
    epoch: int
    epoch_first_step: int
    parameters: int
    parameter_bytes: int
    validation_samples: int = 0
    sample_s: float | None = None
    fixed_bytes: float | None = None
    sample_bytes: float | None = None
    bf16: bool = False
    epochs: int | None = None


class SetPlan(Message, frozen=True, kw_only=True):
    """From ``plan.first_step`` on, do this."""

    plan: Plan


class Grant(Message, frozen=True, kw_only=True):
    """Steps below ``until`` may be executed."""

    until: int


class EndEpoch(Message, frozen=True, kw_only=True):
    """The epoch's last step has been granted: validate, step the scheduler, save, report."""

    epoch: int
    snapshot: str


class StepRow(Message, frozen=True, kw_only=True, array_like=True):
    """One rank's account of one step. Seconds, bytes; stamps are on the host's monotonic clock.

    ``loss_sum`` over ``count`` is the rank's mean loss; ``skipped`` tells that a non-finite
    gradient made all ranks (with local steps, this one) skip the step; ``lr`` is the first
    parameter group's rate in it; ``real_s`` is an emulated device's true compute time;
    ``guard_cosine`` and ``guard_error`` compare the compressed gradient with the true one, in the
    steps in which both travelled.
    """

    step: int
    epoch: int
    batch: int
    micro_steps: int
    stamps: Stamps
    loss_sum: float
    count: float
    wire_bytes: float
    memory_bytes: float | None = None
    memory_peak_bytes: float | None = None
    skipped: bool = False
    loss_scale: float | None = None
    lr: float | None = None
    real_s: float | None = None
    bucket_bytes: tuple[int, ...] = ()
    guard_cosine: float | None = None
    guard_error: float | None = None


class Progress(Message, frozen=True, kw_only=True):
    """Rows of a rank's finished steps, in order."""

    rank: int
    generation: int
    rows: tuple[StepRow, ...]


class MemoryCap(Message, frozen=True, kw_only=True):
    """The rank's device holds a micro-batch of at most ``micro_batch`` samples.

    ``tried`` is what did not fit; None: nothing failed, it follows from the measured peaks.
    ``lost`` tells that the step could not be saved, and the rank gives up.
    """

    rank: int
    generation: int
    step: int
    micro_batch: int
    tried: int | None = None
    lost: bool = False


class EpochReport(Message, frozen=True, kw_only=True):
    """A rank has finished an epoch. Each metric is ``(sum, count)`` over its own samples."""

    rank: int
    generation: int
    epoch: int
    metrics: dict[str, tuple[float, float]]
    validate_s: float = 0.0


class Finished(Message, frozen=True, kw_only=True):
    """An own loop has come to its end, on all ranks before the same step."""

    rank: int
    generation: int
    step: int


class SaveState(Message, frozen=True, kw_only=True):
    """The training state goes to ``path``, by rank 0, once all earlier grants are executed.

    All ranks get it: what differs between them is sent to rank 0.
    """

    path: str
    call_id: int


class Saved(Message, frozen=True, kw_only=True):
    """Rank 0 has written the training state."""

    path: str
    call_id: int
    step: int


class Call(Message, frozen=True, kw_only=True):
    """Run a pickled function on the rank once all earlier grants are executed."""

    call_id: int
    pickled: bytes


class Answer(Message, frozen=True, kw_only=True):
    """What the called function returned, or how it failed."""

    call_id: int
    rank: int
    ok: bool
    pickled: bytes


class Notice(Message, frozen=True, kw_only=True):
    """Something a person should know; it stops nothing."""

    rank: int
    generation: int
    step: int
    level: str
    text: str


class Failed(Message, frozen=True, kw_only=True):
    """The rank cannot go on. ``at`` is when, on the host's monotonic clock."""

    rank: int
    generation: int
    step: int
    at: float
    type_name: str
    text: str
    traceback: str
    pickled: bytes = b""
    victim: bool = False


class Leave(Message, frozen=True, kw_only=True):
    """End the process in good order."""


AnyMessage = (
    Hello
    | Join
    | StoreReady
    | Rendezvous
    | Ready
    | SetPlan
    | Grant
    | EndEpoch
    | Progress
    | MemoryCap
    | EpochReport
    | Finished
    | SaveState
    | Saved
    | Call
    | Answer
    | Notice
    | Failed
    | Leave
)


def encode(message: Message) -> bytes:
    """Returns the message's wire form."""
    return msgspec.msgpack.encode(message)


def decode(wire: bytes) -> Any:
    """Returns the message that ``wire`` holds.

    Raises:
        ProtocolError: It is not one of our messages.
    """
    try:
        return msgspec.msgpack.decode(wire, type=AnyMessage)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{len(wire)} bytes that are not a hetkit message: {error}") from error
