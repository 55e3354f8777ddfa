"""Error feedback by parameter name."""

import pytest
import torch

from hetkit.worker.codecs.feedback import Feedback


def added(feedback: Feedback, name: str, elements: int = 2) -> list[float]:
    values = torch.zeros(elements)
    feedback.add(name, values)
    return values.tolist()


def test_what_is_pending_is_neither_used_nor_saved_until_the_step_is_good():
    feedback = Feedback()
    feedback.put("w", torch.tensor([1.0, 2.0]))
    assert added(feedback, "w") == [0, 0]
    assert feedback.state_dict() == {}
    feedback.settle(good=True)
    assert added(feedback, "w") == [1, 2]
    feedback.put("w", torch.tensor([5.0, float("nan")]))
    feedback.settle(good=False)
    assert added(feedback, "w") == [1, 2]
    assert feedback.norm() == pytest.approx(5**0.5)


def test_a_later_step_does_not_write_into_what_waits():
    feedback, rest = Feedback(), torch.tensor([1.0, 2.0])
    for factor in (1, 2, 3):
        feedback.put("w", factor * rest)
        feedback.settle(good=True)
        feedback.put("w", -rest)
        feedback.settle(good=False)
        assert added(feedback, "w") == [factor, 2 * factor]


def test_state_goes_on_elsewhere_and_other_sizes_begin_anew():
    feedback, other = Feedback(), Feedback()
    feedback.put("w", torch.tensor([1.0, 2.0]))
    feedback.settle(good=True)
    other.load_state_dict(feedback.state_dict())
    assert added(other, "w") == [1, 2]
    assert added(other, "w", elements=3) == [0, 0, 0]
    assert added(other, "v") == [0, 0]
    other.put("w", torch.tensor([9.0, 9.0]))
    other.settle(good=True)
    assert added(feedback, "w") == [1, 2], "a copy"
