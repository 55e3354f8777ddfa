"""Autograd's graph: what a tensor was computed from."""

from collections.abc import Callable
from typing import Any

import torch


def ancestors(tensor: torch.Tensor) -> set[Any]:
    """Returns the graph nodes that backward from ``tensor`` would run through.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> found = ancestors((weight * 2).sum())
        >>> len(found), weight in leaves(found)
        (3, True)
    """
    nodes: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            ahead += [before for before, _ in node.next_functions]
    return nodes


def leaves(nodes: set[Any]) -> set[torch.Tensor]:
    """Returns the tensors whose gradients are accumulated at one of ``nodes``."""
    found = (getattr(node, "variable", None) for node in nodes)
    return {tensor for tensor in found if isinstance(tensor, torch.Tensor)}


class _Anchor(torch.autograd.Function):
    """A zero that depends on all its arguments, and has no gradient for any of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.size = len(tensors)
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        nothing: tuple[None, ...] = (None,) * ctx.size
        return nothing


anchor: Callable[..., torch.Tensor] = _Anchor.apply
"""``anchor(*tensors)``: a zero; backward from it visits each of the tensors, and adds nothing.

To DistributedDataParallel a parameter is then done in every backward, used or not; the gradient of
one that no rank used stays None, as in one process.

Example:
    >>> used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> ((used * 3).sum() + anchor(used, unused)).backward()
    >>> used.grad, unused.grad
    (tensor([3.]), None)
"""
