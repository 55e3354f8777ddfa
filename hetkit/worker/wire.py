"""The wire: carries a codec's tensors between the ranks; stamps, counts and (emulated) delays them.

Every collective is stamped where it starts and where it ends, on a clock that the ranks share, so
that `hetkit.planning.time_split` can tell waiting from transfer. An emulated link is held by the
one who waits for it.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hetkit.worker.emulated_link import EmulatedLink


class GroupWire:
    """Carries tensors over a process group; stamps each collective and counts its bytes.

    Args:
        group: The engine's own process group.
        link: The emulated link, or None for a real one.
    """

    def __init__(self, group: dist.ProcessGroup, link: EmulatedLink | None) -> None:
        self.world_size, self.rank = group.size(), group.rank()
        self.collectives: list[tuple[float, float]] = []
        self._group = group
        self._link = link
        # What runs beside the caller is timed where it ends, and a link is held by who waits.
        self.carries_cuda = dist.get_backend(group) == "nccl"
        self.immediate = link is None and dist.get_backend(group) == "gloo"

    def start_all_reduce(
        self, tensor: torch.Tensor, failed: Callable[[BaseException], None]
    ) -> "torch.futures.Future[torch.Tensor]":
        """Starts summing ``tensor`` over all ranks; the future holds the sum, in that tensor.

        Args:
            tensor: What is summed, in place.
            failed: Called with what went wrong, before the future raises it.
        """
        place, start = len(self.collectives), time.monotonic()
        self.collectives.append((start, start))
        collectives = self.collectives

        def done(future: "torch.futures.Future[list[torch.Tensor]]") -> torch.Tensor:
            collectives[place] = (start, time.monotonic())  # sums may overtake each other
            try:
                future.value()
            except Exception as error:
                failed(error)
                raise
            return tensor

        # Not dist.all_reduce: its logging wrapper takes longer than the call.
        work = self._group.allreduce([tensor])
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
        return summed

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor`` over all ranks, in place."""
        start, arrival = self._arrive()
        dist.all_reduce(tensor, group=self._group)
        if self._link:
            self._link.occupy(arrival, tensor.numel() * tensor.element_size())  # sparse ones too
        self.stamp(start)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Sends the r-th of equal parts of ``input`` to rank r; ``output`` holds what came."""
        start, arrival = self._arrive()
        dist.all_to_all_single(output, input, group=self._group)
        if self._link:
            self._link.occupy_half(arrival, input.nbytes)
        self.stamp(start)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Fills ``output`` with every rank's ``input``, in rank order."""
        start, arrival = self._arrive()
        parts = list(output.view(-1).chunk(self.world_size))
        dist.all_gather(parts, input.view(-1), group=self._group)
        if self._link:
            self._link.occupy_half(arrival, output.nbytes)
        self.stamp(start)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Gives all ranks the ``tensor`` of the one with place ``source`` in the group."""
        start, arrival = self._arrive()
        dist.broadcast(tensor, group_src=source, group=self._group)
        if self._link:
            self._link.occupy_spread(arrival, tensor.nbytes)
        self.stamp(start)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Returns every rank's few values, stacked in rank order; too small for a link's time."""
        start = time.monotonic()
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(parts, values, group=self._group)
        self.stamp(start)
        return torch.stack(parts)

    def stamp(self, start: float) -> None:
        """Counts what ran since ``start`` as one collective."""
        self.collectives.append((start, time.monotonic()))

    def _arrive(self) -> tuple[float, float]:
        """Returns now, and when an emulated transfer begins that this rank takes part in.

        That is not when gloo is done with its own, but when the last rank has come: the ranks agree
        on that moment first (one host, so one monotonic clock).
        """
        start = time.monotonic()
        if self._link is None:
            return start, start
        moment = torch.tensor([start], dtype=torch.float64)
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self._group)
        return start, float(moment.item())
