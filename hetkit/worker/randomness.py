"""Randomness: what is random is seeded by what it is for, never by where it runs.

Each use of the global generators (Python's ``random``, ``numpy.random`` and PyTorch's on the CPU)
has a seed of its own, so a restart needs no saved state::

    an epoch's order          (seed, epoch)
    a sample's augmentation   (seed, epoch, index, how often the index came before in the epoch)
    inside a step: dropout    (seed, step, rank)      the only one that depends on the split
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_all(number: int) -> None:
    """Seeds the three global generators of the CPU.

    Not ``torch.manual_seed``, which also seeds the GPUs and takes a hundred times as long.

    Args:
        number: At least 0 and below 2⁶⁴.
    """
    random.seed(number)
    np.random.seed(number >> 32)
    torch.default_generator.manual_seed(number)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds what is random inside a step, on the rank's device too."""
    # Fibonacci hashing: neighbours differ in the high bits too, of which `seed_all` makes use.
    mixed = ((seed * 1_000_003 + step) * 65_537 + rank) * int(_GOLDEN) % 2**64
    seed_all(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed % 2**63)


@contextmanager
def aside() -> Iterator[None]:
    """Leaves the three global generators as they were, whatever runs inside.

    Example:
        >>> before = torch.get_rng_state()
        >>> with aside():
        ...     _ = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    before = generator_states()
    try:
        yield
    finally:
        restore_generators(before)


def generator_states() -> tuple[Any, ...]:
    """Returns the states of the three global generators, for `restore_generators`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore_generators(states: tuple[Any, ...]) -> None:
    """Puts the three global generators back to where `generator_states` found them."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def sample_seeds(
    seed: int, epoch: int, indices: Sequence[int], repeats: Sequence[int] | None = None
) -> list[int]:
    """Returns a seed for each sample; it does not depend on the split, nor on who loads it.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) after each word that goes in.

    Args:
        seed: The session's seed.
        epoch: The epoch.
        indices: The samples.
        repeats: How often each was drawn before in this epoch; None: never.

    Example:
        >>> sample_seeds(0, 1, [5, 6])[0] == sample_seeds(0, 1, [5])[0]
        True
    """
    keys = _mix(np.full(len(indices), seed % 2**64, dtype=np.uint64))
    for word in (epoch, indices, 0 if repeats is None else repeats):
        keys = _mix(keys + _GOLDEN + np.asarray(word).astype(np.uint64))
    numbers: list[int] = keys.tolist()
    return numbers


def _mix(keys: Any) -> Any:
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
