from typing import NamedTuple

import numpy as np
import pytest
import torch

from hetkit.worker.agreement import fingerprint


class Opaque:
    """Its repr holds an address, which two processes do not share."""


class Pair(NamedTuple):
    x: object
    y: object


SAMPLES = {
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "transposed": lambda: torch.arange(6.0).reshape(3, 2).t(),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.0, requires_grad=True),
    "array": lambda: np.arange(6),
    "objects": lambda: np.array([None, "a"], dtype=object),
    "text": lambda: "3",
    "bytes": lambda: b"3",
    "number": lambda: 3,
    "fraction": lambda: 3.0,
    "numpy's number": lambda: np.float32(3),
    "none": lambda: None,
    "list": lambda: [3, [4, 5]],
    "other list": lambda: [[3, 4], 5],
    "tuple": lambda: (3, [4, 5]),
    "named tuple": lambda: Pair(3, [4, 5]),
    "mapping": lambda: {"x": torch.ones(2), "y": 3},
    "other mapping": lambda: {"x": torch.ones(2), "y": 4},
    "opaque": Opaque,
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_equal_samples_have_one_fingerprint_that_fits_a_tensor(kind):
    number = fingerprint(SAMPLES[kind]())
    assert number == fingerprint(SAMPLES[kind]())
    assert torch.tensor([number, -number]).tolist() == [number, -number]


def test_different_samples_differ():
    assert len({fingerprint(make()) for make in SAMPLES.values()}) == len(SAMPLES)
