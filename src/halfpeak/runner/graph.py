"""Which parameters a loss depends on, read from the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def unreachable_parameters(loss: Tensor, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters that a backward pass of ``loss`` would give no gradient, with their names.

    Walks the graph without recursion, so its depth does not matter. Call it before ``backward``, which frees the graph.

    >>> model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "idle": nn.Linear(1, 1, bias=False)})
    >>> [name for name, _ in unreachable_parameters(model["used"](Tensor([1.0])).sum(), model)]
    ['idle.weight']
    """
    reached: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting += [function for function, _ in node.next_functions]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached and parameter is not loss:
            yield name, parameter
