"""A rank whose process somebody else has started, and whose loop is the script around it."""

import time
from collections.abc import Callable

from hetkit.errors import LaunchError, WorkerError
from hetkit.launch import messages as m
from hetkit.launch.channel import Link
from hetkit.worker.own.loop import Worker
from hetkit.worker.own.rank import OwnRank

START_TIMEOUT_S = 120.0
"""How long the ranks may take to find each other."""


class ScriptRank(OwnRank):
    """A rank that hands its worker to the script, instead of calling a function with it.

    Args:
        link: The channel to the coordinator.
        generation: Which start of the workers this one belongs to.
        rank: Its rank.
        after_epoch: Called with each epoch that was closed.
    """

    def __init__(
        self, link: Link, generation: int, rank: int, after_epoch: Callable[[int], None]
    ) -> None:
        super().__init__(link, generation, rank)
        self._after_epoch = after_epoch

    def begin(self) -> Worker:
        """Joins the others and returns the worker.

        Raises:
            LaunchError: They have not come together in time.
        """
        self.hello()
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._worker is None:
            message = self._link.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise LaunchError(
                    f"rank {self.rank} has not heard from all others within "
                    f"{START_TIMEOUT_S:.0f} s: did every rank get to hetkit.worker()?"
                )
            self._handle(message)
            if self._left:
                self._leave()
        return self._worker

    def tell(self, error: BaseException) -> None:
        """Tells the coordinator that the script has failed."""
        self._report(error)

    def await_epoch_end(self) -> None:
        """Closes the epoch, and waits until it is in the ledger."""
        epoch = self._at_work().state.epoch
        super().await_epoch_end()
        self._after_epoch(epoch)

    def _load(self, join: m.Join) -> None:
        return None

    def _leave(self) -> None:
        raise WorkerError("another rank has failed, or rank 0 has ended the run: see there.")
