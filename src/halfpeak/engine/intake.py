"""Intake: takes the gradients that autograd has left scaled into the true-sized ones that the optimizer reads."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from halfpeak.engine.slots import Slot
from halfpeak.engine.sums import Sums
from halfpeak.fused.layout import gradients_of
from halfpeak.ops import foreach, reference


class Intake:
    """``target.grad += source.grad / scale``, in the dtype of the target, for some parameters of a backward pass at a time.

    Every parameter for itself: in which order and company they are taken in changes no bit of the sums.

    Args:
        there: true-sized gradients that were set aside, by ``id`` of the parameter. Of a parameter without a master that is
            taken in early the sum waits here, where autograd does not add to it.
        inv_scale: by what gradients are multiplied.  # f32[]
        found_inf: set to 1 where one is not finite then.  # f32[]
        sums: how it is done.

    Attributes:
        has_added: whether something has been added to gradients of an earlier backward pass, which cannot be undone.
    """

    def __init__(self, there: dict[int, Tensor], inv_scale: Tensor, found_inf: Tensor, sums: Sums) -> None:
        self._there = there
        self._inv_scale = inv_scale
        self._found_inf = found_inf
        self._sums = sums
        self._begun: list[Tensor] = []
        self.has_added = False

    def take_early(self, slots: Sequence[Slot]) -> None:
        """Take in gradients while the backward pass goes on. Ones that are more than dense numbers wait for its end."""
        fresh = gradients_of([slot.source for slot in slots])
        if any(grad is not None and (grad.requires_grad or grad.is_sparse) for grad in fresh):
            return
        ready = [slot for slot, grad in zip(slots, fresh, strict=True) if grad is not None]
        new = [slot.target for slot in ready if self._before(slot) is None]
        self.has_added |= len(new) < len(ready)
        self._begun += new
        self.take(ready)
        for slot in ready:
            if slot.source is slot.target and slot.source.grad is not None:
                self._there[id(slot.source)] = slot.source.grad
            slot.source.grad = None

    def undo(self) -> None:
        """Drop what :meth:`take_early` has made, where it has added to nothing."""
        for target in self._begun:
            target.grad = None

    def take(self, slots: Sequence[Slot]) -> None:
        """Take in what lies at the sources of ``slots``."""
        into: list[Tensor] = []
        more: list[Tensor] = []
        first: list[Slot] = []
        for slot in slots:
            fresh, there = slot.source.grad, self._before(slot)
            if fresh is None:
                slot.target.grad = there
            elif fresh.requires_grad:
                slot.target.grad = self._with_graph(there, fresh, slot.target.dtype)
            elif there is None:
                first.append(slot)
            else:
                there = _summable(there, fresh)
                slot.target.grad = there
                into.append(there)
                more.append(fresh)
        self._take_first(first)
        self._sums.accumulate_(into, more, self._inv_scale, self._found_inf)

    def _before(self, slot: Slot) -> Tensor | None:
        return self._there.get(id(slot.source)) if slot.source is slot.target else slot.target.grad

    def _with_graph(self, there: Tensor | None, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """The true-sized sum as a function of the parameters: after ``create_graph=True``, a penalty may depend on it."""
        (true,) = reference.unscaled([fresh], [dtype], self._inv_scale, self._found_inf)
        return true if there is None else there + true

    def _take_first(self, slots: Sequence[Slot]) -> None:
        """Gradients that nothing is added to: unscaled where they lie, or into a new tensor of the master's dtype."""
        plain = [
            slot.source.grad for slot in slots if slot.source is slot.target and slot.source.grad is not None
        ]
        foreach.unscale_(plain, self._inv_scale, self._found_inf)
        mastered = [slot for slot in slots if slot.source is not slot.target]
        low = [grad for grad in map(_GRAD, (slot.source for slot in mastered)) if grad is not None]
        dtypes = [slot.target.dtype for slot in mastered]
        high = self._sums.unscaled(low, dtypes, self._inv_scale, self._found_inf)
        for slot, grad in zip(mastered, high, strict=True):
            slot.target.grad = grad


_GRAD: Final = attrgetter("grad")


def _summable(there: Tensor, fresh: Tensor) -> Tensor:
    """``there`` in a layout that ``fresh`` can be added to in place: a sparse sum cannot take a dense addend."""
    return there.to_dense() if there.is_sparse and not fresh.is_sparse else there
