import weakref

import pytest
import torch

from hetkit.worker.emulation import EmulatedOutOfMemoryError
from hetkit.worker.out_of_memory import (
    Arrivals,
    Buffers,
    add_gradients,
    is_out_of_memory,
    let_go,
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        EmulatedOutOfMemoryError("emulated"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_looks_like_out_of_memory(error):
    assert is_out_of_memory(error)


def test_the_allocator_of_this_machine_says_it_that_way():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch"), ValueError("DefaultCPUAllocator")]
)
def test_what_does_not(error):
    assert not is_out_of_memory(error)


def test_what_the_failed_pass_held_is_freed():
    held = []

    def run() -> None:
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError

    try:
        run()
    except torch.OutOfMemoryError as error:
        let_go(error, torch.device("cpu"))
        assert held[0]() is None


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError


def broken(first, last):
    return (Breaks.apply(first * 2) * last).sum()


@pytest.mark.parametrize("passes_before", [0, 1, 2])
def test_a_broken_backward_tells_which_gradients_are_missing(passes_before):
    first, last = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    arrivals = Arrivals([first, last])
    for _ in range(passes_before):
        arrivals.begin()
        (first * last).sum().backward()
        assert arrivals.missing() == ()
    arrivals.begin()
    with pytest.raises(torch.OutOfMemoryError):
        broken(first, last).backward()
    missing = arrivals.missing()
    assert len(missing) == 1
    assert missing[0] is first
    assert arrivals.any


def test_before_a_backward_all_are_missing():
    weight = torch.ones(3, requires_grad=True)
    arrivals = Arrivals([weight])
    arrivals.begin()
    assert not arrivals.any
    assert len(arrivals.missing()) == 1


def test_a_gradient_is_added_past_the_hooks_and_into_the_very_tensor():
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    called = []
    weight.register_post_accumulate_grad_hook(called.append)
    bucket = torch.full((2,), 5.0)
    weight.grad = bucket
    add_gradients((3 * weight).sum(), [weight, other])
    assert bucket.tolist() == [8.0, 8.0]
    assert weight.grad is bucket
    assert other.grad is None
    assert called == []


def test_a_sparse_gradient_is_added_too():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    for _ in range(2):
        add_gradients(embedding(torch.tensor([1])).sum(), [embedding.weight])
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def test_buffers_that_no_pass_moves_are_not_kept_for_long():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)
            self.register_buffer("table", torch.ones(3))

    model = Model()
    buffers = Buffers(model)
    for _ in range(3):
        buffers.keep()
        before = [buffer.clone() for buffer in model.norm.buffers()]
        model.norm(torch.tensor([[1.0], [3.0]]))
    assert len(buffers._kept) == 3
    buffers.restore()
    for buffer, old in zip(model.norm.buffers(), before, strict=True):
        assert torch.equal(buffer, old)
