"""Strays: parameters of the models that no optimizer of the engine steps, whose gradients must be true-sized all the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from halfpeak.core.tracing import untraced
from halfpeak.engine.block import kept
from halfpeak.engine.lane import Lane
from halfpeak.engine.slots import Slots
from halfpeak.fused.layout import gradients_of
from halfpeak.ops import foreach, reference


class Strays:
    """Divides the gradients that a scaled loss leaves in parameters of somebody else's by the scale.

    A second optimizer that was not prepared, or is of another engine, would step on gradients 65,536 times too large. They
    take no part in verdicts and norms: an infinity in one keeps nobody from stepping.

    Args:
        models: whose parameters are looked after.
        lanes: all lanes of the engine.
    """

    def __init__(self, models: Sequence[nn.Module], lanes: Sequence[Lane]) -> None:
        self._models = list(models)
        self._lanes = lanes
        self._known: list[Slots] = []
        # What every layer holds, as torch keeps it, and what that was: layers may come, go and be replaced at any time.
        self._tables: list[dict[str, Any]] = []
        self._entries: list[object] = []
        self._found: list[Tensor] = []
        # True-sized gradients from before, for as long as scaled ones lie in their place.
        self._parked: list[Tensor | None] | None = None

    def watch(self, model: nn.Module) -> None:
        """Look after one more model."""
        self._models.append(model)
        self._known = []

    @untraced
    def open(self) -> None:
        """Before a backward pass: set aside what is there, unless it lies there scaled and waiting."""
        # Where none is left, somebody has called zero_grad() in the middle of a window.
        waits = self._parked is not None and any(grad is not None for grad in gradients_of(self._found))
        parked = dict(zip(map(id, self._found), self._parked or (), strict=False)) if waits else {}
        self._look()
        self._parked = [parked[id(p)] if id(p) in parked else _set_aside(p) for p in self._found]

    @untraced
    def put_back(self) -> None:
        """Everything as it was before :meth:`open`; what has been scaled since is dropped."""
        for parameter, grad in zip(self._found, self._parked or (), strict=False):
            parameter.grad = grad
        self._parked = None

    @untraced
    def absorb(self, scale: Tensor) -> None:
        """Make the new gradients true-sized and add what was set aside."""
        fresh = [(p, p.grad) for p in self._found if p.grad is not None]
        before = {id(p): grad for p, grad in zip(self._found, self._parked or (), strict=False)}
        self.put_back()
        if not fresh:
            return
        inv_scale, nobody = scale.reciprocal(), torch.zeros_like(scale)
        foreach.unscale_([grad for _, grad in fresh if not grad.requires_grad], inv_scale, nobody)
        for parameter, grad in fresh:
            if grad.requires_grad:
                (grad,) = reference.unscaled([grad], [grad.dtype], inv_scale, nobody)
            there = before[id(parameter)]
            parameter.grad = grad if there is None else there + grad

    def _look(self) -> None:
        """Find them again where an optimizer's parameters have changed, or those of a model."""
        now = [lane.slots() for lane in self._lanes]
        if not (_are(now, self._known) and _are(_values(self._tables), self._entries)):
            stepped = {id(slot.source) for slots in now for slot in slots}
            found = {id(p): p for model in self._models for p in model.parameters() if id(p) not in stepped}
            self._found = list(found.values())
            self._known = now
            modules = {id(module): module for model in self._models for module in model.modules()}.values()
            self._tables = [table for module in modules for table in (module._parameters, module._modules)]
            self._entries = _values(self._tables)


def _set_aside(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = kept(parameter.grad), None
    return grad


def _values(tables: Sequence[dict[str, Any]]) -> list[object]:
    """Parameters and layers by which a model is asked for its parameters. Read in every step, so in a loop that runs in C."""
    return list(chain.from_iterable(map(dict[str, Any].values, tables)))


def _are(now: Sequence[object], known: Sequence[object]) -> bool:
    return len(now) == len(known) and all(map(is_, now, known))
