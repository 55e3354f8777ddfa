"""Local steps: the ranks train on their own and average every H steps. This is different maths.

Between two synchronisations a rank takes its samples of each global batch, as always, and makes an
optimizer step on *its own* mean gradient; nothing is exchanged. Then the changes are averaged::

    rank 0   x ──step──step──step──▶ x₀ ┐                       Δᵢ = xᵢ − x
    rank 1   x ──step──step──step──▶ x₁ ┴▶ x + Δ ──step── …      Δ = (Σ pᵢ Hᵢ) · Σ pᵢ Δᵢ / Hᵢ

pᵢ is the share of the denominators (samples, or what the loss counted) that rank i has stepped on
since, and Hᵢ how many steps it made: a rank without samples makes none. Without the division by Hᵢ
a rank with more steps would pull the model towards its own samples (FedNova, Wang et al. 2020);
with equal Hᵢ it is the plain weighted average (local SGD, Stich 2019). With an outer momentum β,
u ← β·u + Δ and x ← x + u (SlowMo, Wang et al. 2020, with outer rate 1 and a constant inner rate).

What is averaged are the parameters. The optimizer's state (momentum, Adam's moments) stays the
rank's own within an epoch: sending it would cost two or three times the bytes, on the slow links
that this is for, and there is no right average of second moments. At the epoch's end all ranks take
the state of the rank with the largest batch, so that checkpoints and what follows are of one kind.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetkit.planning.exchange_time import BUCKET_BYTES
from hetkit.worker.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank did between two synchronisations.

    Args:
        count: The denominators of the steps that it made: samples, or what the loss counted.
        steps: Steps that it made; those without samples or with an overflow are none.
        scale: Its loss scale.
        good_steps: Steps since that scale last changed.
    """

    count: float
    steps: int
    scale: float
    good_steps: int


class LocalSteps:
    """Counts a rank's own steps, and averages the ranks' changes.

    Args:
        model: What is trained; equal on all ranks now.
        exchange: Carries the changes; None for a single rank.
        rank: This rank.

    Attributes:
        steps: Steps since the last synchronisation, on whatever rank.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> weight = torch.nn.init.constant_(model.weight, 1.0)
        >>> local = LocalSteps(model, exchange=None, rank=0)
        >>> for _ in range(2):
        ...     local.begin()
        ...     local.plan_step(samples=4)
        ...     _ = weight.data.sub_(0.5)
        ...     local.made_step(count=4)
        ...     ranks = local.exchange(scale=1.0, good_steps=0)
        ...     local.apply(ranks, outer_momentum=0.5)
        >>> weight.item()
        -0.25
    """

    def __init__(self, model: torch.nn.Module, exchange: Exchange | None, rank: int) -> None:
        self.steps = 0
        self._exchange = exchange
        self._rank = rank
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._start: list[torch.Tensor] = []
        self._changes: list[torch.Tensor] = []
        self._momentum: dict[str, torch.Tensor] = {}
        self._planned = self._count = 0.0
        self._made = 0

    def begin(self) -> None:
        """Opens a window, where none is open: changes are counted from the parameters as now."""
        if not self._start:
            self._start = [weight.clone() for weight in self._weights()]
            self.steps = self._made = 0
            self._planned = self._count = 0.0

    def end(self) -> None:
        """Forgets everything: the ranks make their steps together again."""
        self._start, self._changes, self._momentum = [], [], {}

    def plan_step(self, samples: int) -> None:
        """A step of ``samples`` over all ranks begins."""
        self.steps += 1
        self._planned += samples

    def made_step(self, count: float) -> None:
        """This rank has made its step, on a mean over ``count``."""
        self._made += 1
        self._count += count

    def exchange(
        self, *, scale: float, good_steps: int, bucket_bytes: int | None = None
    ) -> tuple[RankSteps, ...]:
        """Sums the ranks' changes, and returns what each rank did.

        Args:
            scale: This rank's loss scale.
            good_steps: Steps since it last changed.
            bucket_bytes: Largest piece that is exchanged at once; None: 25 MiB.
        """
        weight = self._count / (self._made * self._planned) if self._made else 0.0
        self._changes = list(torch._foreach_sub(self._weights(), self._start))
        torch._foreach_mul_(self._changes, weight)
        mine = (self._count, self._made, scale, good_steps)
        exchange = self._exchange
        if exchange is None:
            return (_rank_steps(mine),)
        groups = _groups(self._changes, bucket_bytes or BUCKET_BYTES)
        buckets = [torch.cat([change.reshape(-1) for change in group]) for group in groups]
        if buckets[0].is_cuda:
            torch.cuda.synchronize(buckets[0].device)
        names = iter(self._parameters)
        futures = [
            exchange.submit(bucket, [(next(names), change.shape) for change in group])
            for bucket, group in zip(buckets, groups, strict=True)
        ]
        table = exchange.gather(mine)
        for future in futures:
            future.wait()
        exchange.settle(exchange.all_finite())
        self._changes = [
            piece.view_as(change)
            for bucket, group in zip(buckets, groups, strict=True)
            for piece, change in zip(
                torch.split(bucket, [change.numel() for change in group]), group, strict=True
            )
        ]
        return tuple(_rank_steps(row) for row in table)

    def apply(self, ranks: Sequence[RankSteps], *, outer_momentum: float) -> None:
        """Moves the parameters from the window's start by the average change; closes the window.

        Args:
            ranks: What `exchange` returned.
            outer_momentum: The β.
        """
        # The changes hold Σ nᵢ Δᵢ / (Hᵢ N̂): N̂ was planned, N = Σ nᵢ is what was stepped on.
        count = sum(rank.count for rank in ranks)
        steps = sum(rank.count * rank.steps for rank in ranks)
        torch._foreach_mul_(self._changes, steps / count * self._planned / count if count else 0.0)
        if outer_momentum:
            for name, change in zip(self._parameters, self._changes, strict=True):
                before = self._momentum.get(name)
                self._momentum[name] = (
                    change if before is None else before.mul_(outer_momentum).add_(change)
                )
            self._changes = [self._momentum[name] for name in self._parameters]
        torch._foreach_copy_(self._weights(), torch._foreach_add(self._start, self._changes))
        self._start, self._changes = [], []

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns what a checkpoint keeps: the outer momentum by parameter."""
        return dict(self._momentum)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes a checkpoint's state."""
        self._momentum = {
            name: state[name].to(p.device) for name, p in self._parameters.items() if name in state
        }

    def _weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._parameters.values()]


def share_state(optimizer: torch.optim.Optimizer, source: int, device: torch.device) -> None:
    """Gives all ranks the optimizer state of one: as a checkpoint, never as a pickle.

    Args:
        optimizer: This rank's.
        source: The rank whose state it is.
        device: What the process group carries.
    """
    mine = io.BytesIO()
    if dist.get_rank() == source:
        torch.save(optimizer.state_dict(), mine)
    length = torch.tensor([mine.tell()], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source)
    if dist.get_rank() == source:
        content = torch.frombuffer(bytearray(mine.getvalue()), dtype=torch.uint8).to(device)
        dist.broadcast(content, src=source)
        return
    content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=source)
    file = io.BytesIO(content.cpu().numpy().tobytes())
    optimizer.load_state_dict(torch.load(file, map_location=device, weights_only=True))


def _rank_steps(row: Sequence[float]) -> RankSteps:
    count, steps, scale, good_steps = row
    return RankSteps(count=count, steps=int(steps), scale=scale, good_steps=int(good_steps))


def _groups(tensors: Sequence[torch.Tensor], largest_bytes: int) -> list[list[torch.Tensor]]:
    """Cuts the list into runs of one type and at most so many bytes; one alone may be larger."""
    groups: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        if not groups or groups[-1][0].dtype != tensor.dtype or size > largest_bytes:
            groups.append([])
            size = tensor.numel() * tensor.element_size()
        groups[-1].append(tensor)
    return groups
