"""The switch: which codec is in force, changed by all ranks at the same step, and its state.

A codec is fresh whenever what it works on changes: another codec, other parameters of it, other
islands, local steps in place of gradients (what waits of a gradient is no part of a parameter's
change). What waited in the codec that is left is dropped, and its size told: to send it late was
worse, or no better, in every case that was measured. Toggled back, a codec starts with nothing.

Plans come to all ranks in the same order. Each time one is put in force the ranks compare it first,
since ranks that exchange by different codecs would hang, or end each other's processes.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetkit.errors import WorkerError
from hetkit.plan import Plan
from hetkit.worker.checkpoint import gather_states, open_state
from hetkit.worker.codecs.codec import Codec
from hetkit.worker.codecs.registry import make_codec
from hetkit.worker.exchange import Exchange
from hetkit.worker.guard import LOWEST_COSINE, LOWEST_COSINE_FED_BACK
from hetkit.worker.hierarchy import Archipelago

_ADAPTIVE = ("adam", "adagrad", "adadelta", "adafactor", "rmsprop", "rprop", "lion", "shampoo")
"""Parts of the names of optimizers that are not linear in the gradient."""

_Key = tuple[str, bool, object]


class CodecSwitch:
    """Changes the exchange's codec as the plans say, and keeps its state over checkpoints.

    Args:
        exchange: The gradient exchange.
        own: The task's own codecs by key.
        rank: This rank.
        device: What the process group carries.
        islands: Has codecs work between islands.
    """

    def __init__(
        self,
        exchange: Exchange,
        own: Mapping[str, Callable[[], Codec]],
        rank: int,
        device: torch.device,
        islands: Archipelago,
    ) -> None:
        self._islands = islands
        self._exchange = exchange
        self._own = own
        self._rank = rank
        self._device = device
        self._key: _Key | None = None
        self._kept: dict[str, Any] | None = None
        self._notices: list[str] = []
        self._warned: set[str] = set()

    def apply(self, plan: Plan, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Puts ``plan`` in force before ``step``; all ranks call it there.

        Raises:
            WorkerError: Another rank stands elsewhere or has another plan; on all ranks.
        """
        key = (plan.compression, plan.local, plan.hierarchy)
        changes = key != self._key
        waits = self._exchange.codec.residual_norm() if changes and self._key else None
        norms = self._agree(plan, step, -1.0 if waits is None else waits)
        self._exchange.guard.every = plan.guard_every if plan.compression != "none" else 0
        if not changes:
            return
        if waits is not None:
            self._tell_dropped(str(self._key[0]) if self._key else "", norms)
        self._key = key
        codec = self._islands.over(
            lambda: make_codec(plan.compression, self._own), () if plan.local else plan.hierarchy
        )
        self._restore(codec, key)
        self._exchange.codec = codec
        self._exchange.guard.restart()
        self._warned.discard("cosine")
        if codec.feeds_back and not plan.local:
            self._tell_adaptive(plan.compression, optimizers)

    def look(self) -> None:
        """Takes the guard's reading of the step; a poor one is told once for each codec."""
        reading, codec = self._exchange.reading, self._exchange.codec
        lowest = LOWEST_COSINE_FED_BACK if codec.feeds_back else LOWEST_COSINE
        if reading is None or reading[0] >= lowest or "cosine" in self._warned:
            return
        self._warned.add("cosine")
        cosine, error = reading
        self._notices.append(
            f"what {codec.name} makes of the gradient points elsewhere: its cosine to the true one "
            f"is {cosine:.2f} (below {lowest:g}), its relative error {error:.0%}. Watch the loss, "
            "or choose a finer codec."
        )

    def take_notices(self) -> list[str]:
        """Returns what a person should know, once."""
        notices, self._notices = self._notices, []
        return notices

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what a checkpoint keeps: on rank 0 all ranks' states, elsewhere nothing.

        All ranks must call it, at the same step. Rank 0 holds all of it in memory meanwhile: with
        error feedback, about as much as the gradients, times the ranks.
        """
        codec, key = self._exchange.codec, self._key
        if key is None or codec.as_it_is:
            return None
        states = gather_states(codec.state_dict(), self._device)
        if states is None:
            return None
        return {"compression": key[0], "local": key[1], "ranks": states}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes a checkpoint's state; it is in force as soon as the same codec is."""
        self._kept = state

    def _agree(self, plan: Plan, step: int, waits: float) -> list[float]:
        rows = self._exchange.gather((float(step), float(zlib.crc32(repr(plan).encode())), waits))
        if len({tuple(row[:2]) for row in rows}) > 1:
            steps = ", ".join(f"rank {rank} step {int(row[0])}" for rank, row in enumerate(rows))
            raise WorkerError(
                f"the ranks do not put the same plan in force at the same step ({steps}); here it "
                f"is plan {plan.version} with compression {plan.compression}. This is an error "
                "of hetkit or of what runs beside it: close the session and start another."
            )
        return [row[2] for row in rows]

    def _restore(self, codec: Codec, key: _Key) -> None:
        kept, self._kept = self._kept, None
        if kept is None or (kept["compression"], kept["local"]) != key[:2]:
            return
        ranks, world_size = kept["ranks"], self._exchange.world_size
        # What is alike on all ranks must stay so: of a rank that worked (between islands, leaders).
        worked = max(range(len(ranks)), key=lambda rank: len(ranks[rank]))
        alike = open_state(ranks[worked])
        own = open_state(ranks[self._rank]) if self._rank < len(ranks) else {}
        codec.load_state_dict({**alike, "residuals": own.get("residuals", {})})
        if len(ranks) > world_size:
            self._notices.append(
                f"the checkpoint is of {len(ranks)} devices: what waited in {key[0]} on ranks "
                f"{world_size} to {len(ranks) - 1} is dropped."
            )

    def _tell_dropped(self, compression: str, norms: Sequence[float]) -> None:
        whole = math.sqrt(sum(norm * norm for norm in norms if norm > 0))
        self._notices.append(
            f"{compression} is left: what waited there of earlier gradients is dropped (norm "
            f"{whole:.3g} over all ranks)."
        )

    def _tell_adaptive(self, compression: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {type(each).__name__ for each in optimizers if is_adaptive(each)} - self._warned
        self._warned |= names
        for name in sorted(names):
            self._notices.append(
                f"{compression} sends in later steps what it leaves out now, which suits SGD; "
                f"{name} is not linear in the gradient and may learn worse by it. Watch the loss, "
                'or take compression="int8" or "fp16".'
            )


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Tells by its name, or its bases', whether an optimizer is not linear in the gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> is_adaptive(torch.optim.AdamW([weight])), is_adaptive(torch.optim.SGD([weight]))
        (True, False)
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(part in name for part in _ADAPTIVE for name in names)
