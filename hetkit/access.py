"""Access: what a user gets out of a session's workers: the model, a checkpoint, an answer.

With ``devices="inline"`` the one rank lives in this very process, and is served from here: whoever
waits for it has to let it work meanwhile.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetkit.coordinator import Coordinator
from hetkit.devices.fleet import Fleet
from hetkit.errors import SettingsError
from hetkit.launch.payload import dump_bytes
from hetkit.records.checkpoint_file import pack
from hetkit.subject import Subject
from hetkit.view import View


class Access(View):
    """A view that also reaches the workers.

    Args:
        name: What messages call the session.
        fleet: The devices, in rank order.
        coordinator: What runs the session's workers.
        subject: What is trained.
        folder: The session's private folder.
        seed: The session's seed.
        inline: Whether the one rank is in this very process.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        coordinator: Coordinator,
        *,
        subject: Subject,
        folder: Path,
        seed: int,
        inline: bool,
    ) -> None:
        super().__init__(name, fleet, coordinator)
        self._subject = subject
        self._folder = folder
        self._seed = seed
        self._inline = inline
        self._worker: Any = None

    def model(self, *, ema: bool = False) -> Any:
        """Returns the trained model as it stands now, in this process, on the CPU.

        Of your own loop, the model that it wrapped; where there are several, a dict by name.

        Args:
            ema: The average of the weights that ``Task(ema=…)`` keeps, instead of the weights.

        Raises:
            SessionError: There is no state yet, or the session is closed.
            SettingsError: There is no such average.
        """
        return self._subject.model(self._save_state, self.call, ema=ema)

    def save(self, path: str | Path) -> Path:
        """Writes a checkpoint that `load` goes on from, on any number of devices.

        Raises:
            SessionError: There is no state yet, or the session is closed.
        """
        state = self._save_state()
        try:
            target = Path(path)
            # In mid-epoch, the position only makes sense under the settings in force.
            settings = self.applied or self.settings
            pack(target, state, {"seed": self._seed, "settings": asdict(settings)})
        finally:
            state.unlink(missing_ok=True)
        return target

    def call(self, function: Callable[[Any], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Runs ``function(worker)`` on ranks, between two steps, and returns what they return.

        Args:
            function: Gets the rank's ``rank, world_size, device, model, optimizer, step, epoch``.
            ranks: Which ranks; None: all.

        Raises:
            SettingsError: There is no such rank.
            SessionError: The workers do not run.
            Exception: What the function raised.
        """
        world_size = len(self.ranks)
        chosen = tuple(range(world_size)) if ranks is None else tuple(ranks)
        for rank in chosen:
            if rank not in range(world_size):
                raise SettingsError(f"there is no rank {rank!r}: ranks are 0 to {world_size - 1}.")
        if not chosen:
            return []
        pickled = dump_bytes(function, "function")
        results: list[Any] = self._answer(
            lambda future: self._coordinator.call(chosen, pickled, future)
        )
        return results

    def _save_state(self) -> Path:
        path = self._folder / f"state-{threading.get_ident()}.ckpt"
        saved: Path = self._answer(lambda future: self._coordinator.save(path, future))
        return saved

    def _answer(self, ask: Callable[["Future[Any]"], None]) -> Any:
        future: Future[Any] = Future()
        self._coordinator.ask(lambda: ask(future))
        if self._inline and self._worker is not None:
            self._worker.serve(until=future.done)
        # No time limit: only the user knows how long it takes. A death or a close() ends the wait.
        return future.result()

    def _serve_inline(self) -> None:
        if not self._inline:
            return
        crew, coordinator = self._coordinator.crew, self._coordinator
        if crew.link is None:
            return
        if self._worker is None or self._worker.generation != crew.generation:
            self._worker = self._subject.make_rank(crew.link, crew.generation)
            self._worker.hello()
        rests = ("ready", "paused", "failed", "closed")
        try:
            self._worker.serve(until=lambda: coordinator.status.state in rests)
        except BaseException:
            self._worker = None
            coordinator.wait(lambda status: status.state == "failed", 5.0)
            raise
        if self._worker.unwound and self.state == "paused":
            # What could go on is gone from the stack: the next run builds it anew.
            self._coordinator.ask(self._coordinator.stop)
