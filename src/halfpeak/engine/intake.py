"""Intake: takes the gradients that autograd has left scaled into the true-sized ones that the optimizer reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Final, TypeGuard

import torch
from torch import Tensor

from halfpeak.engine.slots import Slot, Slots
from halfpeak.engine.sums import Sums
from halfpeak.fused.layout import gradients_of
from halfpeak.ops import foreach, reference
from halfpeak.parts.gradient_memory import GradientMemory


class Intake:
    """``target.grad += source.grad / scale``, in the dtype of the target, for some parameters of a backward pass at a time.

    Every parameter for itself: in which order and company they are taken in changes no bit of the sums.

    Args:
        there: true-sized gradients that were set aside, by ``id`` of the parameter. Of a parameter without a master that is
            taken in early the sum waits here, where autograd does not add to it.
        inv_scale: by what gradients are multiplied.  # f32[]
        found_inf: set to 1 where one is not finite then.  # f32[]
        sums: how it is done.
        memory: in which the gradients of masters lie; None for new memory.

    Attributes:
        has_added: whether something has been added to gradients of an earlier backward pass, which cannot be undone.
    """

    def __init__(
        self,
        there: dict[int, Tensor],
        inv_scale: Tensor,
        found_inf: Tensor,
        sums: Sums,
        memory: GradientMemory | None = None,
    ) -> None:
        self._there = there
        self._inv_scale = inv_scale
        self._found_inf = found_inf
        self._sums = sums
        self._memory = memory
        self._begun: list[Tensor] = []
        self.has_added = False

    def take_early(self, slots: Sequence[Slot]) -> bool:
        """Take in gradients while the backward pass goes on.

        Returns:
            False, and nothing is done, where some are more than dense numbers: they wait for its end.
        """
        fresh = gradients_of([slot.source for slot in slots])
        if any(grad is not None and (grad.requires_grad or grad.is_sparse) for grad in fresh):
            return False
        ready = [slot for slot, grad in zip(slots, fresh, strict=True) if grad is not None]
        new = [slot.target for slot in ready if self._before(slot) is None]
        self.has_added |= len(new) < len(ready)
        self._begun += new
        self.take(ready)
        for slot in ready:
            if slot.source is slot.target and slot.source.grad is not None:
                self._there[id(slot.source)] = slot.source.grad
            slot.source.grad = None
        return True

    def undo(self) -> None:
        """Drop what :meth:`take_early` has made, where it has added to nothing."""
        for target in self._begun:
            target.grad = None

    def take(self, slots: Sequence[Slot]) -> None:
        """Take in what lies at the sources of ``slots``."""
        ends = slots if isinstance(slots, Slots) else Slots(slots)
        there = [self._there.get(id(source)) for source in ends.plain] if self._there else None
        self._take(ends.plain, ends.plain, there or [None] * len(ends.plain))
        self._take(ends.lows, ends.highs, gradients_of(ends.highs))

    def _take(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], before: Sequence[Tensor | None]
    ) -> None:
        """:meth:`take`, of parameters that all have masters or all have none."""
        fresh = gradients_of(sources)
        if are_numbers(fresh):
            if are_none(before):
                self._begin(targets, fresh, mastered=sources is not targets)
                return
            if are_numbers(before):
                _assign(targets, before)
                self._sums.accumulate_(before, fresh, self._inv_scale, self._found_inf)
                return
        first: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for target, grad, there in zip(targets, fresh, before, strict=True):
            if grad is None:
                target.grad = there
            elif grad.requires_grad:
                target.grad = self._with_graph(there, grad, target.dtype)
            elif there is None:
                first.append((target, grad))
            else:
                there = _summable(there, grad)
                target.grad = there
                more.append((there, grad))
        new, grads = [target for target, _ in first], [grad for _, grad in first]
        self._begin(new, grads, mastered=sources is not targets)
        into, grads = [there for there, _ in more], [grad for _, grad in more]
        self._sums.accumulate_(into, grads, self._inv_scale, self._found_inf)

    def _begin(self, targets: Sequence[Tensor], grads: Sequence[Tensor], *, mastered: bool) -> None:
        """Gradients that nothing is added to: unscaled where they lie, or into a tensor like the master."""
        if not mastered:
            foreach.unscale_(grads, self._inv_scale, self._found_inf)
        elif self._memory is not None and are_numbers(grads) and set(map(type, targets)) == {Tensor}:
            high = self._memory.take(targets)
            self._sums.unscale_into(high, grads, self._inv_scale, self._found_inf)
            _assign(targets, high)
        else:
            dtypes = [target.dtype for target in targets]
            _assign(targets, self._sums.unscaled(grads, dtypes, self._inv_scale, self._found_inf))

    def _before(self, slot: Slot) -> Tensor | None:
        return self._there.get(id(slot.source)) if slot.source is slot.target else slot.target.grad

    def _with_graph(self, there: Tensor | None, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """The true-sized sum as a function of the parameters: after ``create_graph=True``, a penalty may depend on it."""
        (true,) = reference.unscaled([fresh], [dtype], self._inv_scale, self._found_inf)
        return true if there is None else there + true


def _assign(targets: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for target, grad in zip(targets, grads, strict=True):
        target.grad = grad


def are_none(grads: Sequence[Tensor | None]) -> bool:
    """Whether there is no gradient."""
    return all(map(is_, grads, repeat(None)))


def are_numbers(grads: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
    """Whether every gradient is there, plain and dense, and has no graph. Asked in loops that run in C."""
    return (
        set(map(type, grads)) <= {Tensor}
        and not any(map(_HAS_GRAPH, grads))
        and set(map(_LAYOUT, grads)) <= {torch.strided}
    )


_HAS_GRAPH: Final = attrgetter("requires_grad")
_LAYOUT: Final = attrgetter("layout")


def _summable(there: Tensor, fresh: Tensor) -> Tensor:
    """``there`` in a layout that ``fresh`` can be added to in place: a sparse sum cannot take a dense addend."""
    return there.to_dense() if there.is_sparse and not fresh.is_sparse else there
