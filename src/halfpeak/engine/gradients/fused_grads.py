"""Gradients, scaled or unscaled, that the step of a fused optimizer measures, clips and reads in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import is_

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfpeak.engine.gradients.params import ParamPairs, ParamTable
from halfpeak.engine.gradients.window import Pending, Unscaled, refuse_edits
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import DecisionInputs, StepDecision, StepInputs
from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_dense, are_none, gradients_of
from halfpeak.ops.shards import local_gradients


class FusedGrads:
    """The gradients of one step of one fused optimizer.

    The sum of squares adds scaled and unscaled gradients in the same order. A checkpoint between backward and step,
    which unscales them, therefore changes no bit of a run.

    Args:
        optimizer: the optimizer that reads the gradients.
        model_params: the parameters that the step writes, in the order of the groups.
        grads: the gradient of each parameter, or None.
        inv_scale: 1 / scale; 1 for unscaled gradients.  # f32[]
        pairs: the parameters of the window.
        scaled: whether the gradients are scaled, where autograd left them.
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        model_params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        inv_scale: Tensor,
        pairs: ParamPairs,
        *,
        scaled: bool,
    ) -> None:
        self._optimizer = optimizer
        self._inv_scale = inv_scale
        self._inputs = StepInputs(local_gradients(grads, model_params), model_params, inv_scale)
        self._pairs = pairs
        self._scaled = scaled

    @classmethod
    def of_pending(
        cls, window: Pending, grads: Sequence[Tensor | None], table: ParamTable, optimizer: FusedOptimizer
    ) -> FusedGrads:
        """The pending gradients of a window: the results of :func:`pending_without_sentinel`."""
        inv_scale = window.scale.reciprocal()
        return cls(optimizer, table.model_params, grads, inv_scale, window.pairs, scaled=True)

    @classmethod
    def of_unscaled(cls, window: Unscaled, table: ParamTable, optimizer: FusedOptimizer) -> FusedGrads | None:
        """The unscaled gradients of a window; None if there are none, or if one is not a plain dense tensor."""
        grads = gradients_of(table.main_params)
        present = [grad for grad in grads if grad is not None]
        if not present or not are_dense(present):
            return None
        inv_scale = torch.ones_like(window.found_inf)
        return cls(optimizer, table.model_params, grads, inv_scale, window.pairs, scaled=False)

    @property
    def is_partial(self) -> bool:
        """Whether a parameter has no gradient. The step writes neither its master nor its weight."""
        return any(map(is_, self._inputs.grads, repeat(None)))

    def measure(self) -> tuple[Tensor, Tensor]:
        """Read the gradients once: the unscaled sum of squares, and whether one is not finite.  # f32[], f32[]"""
        stats = self._optimizer.measure(self._inputs)
        return stats.sum_squares, stats.found_inf

    def decide(self, inputs: DecisionInputs) -> StepDecision | None:
        """:meth:`measure`, decide and :meth:`hand_over`, all on the device; None if the optimizer's backend cannot."""
        decision = self._optimizer.decide(self._inputs, inputs)
        if decision is not None:
            self._inputs = self._inputs._replace(multiplier=decision.multiplier)
            self._optimizer.set_step_inputs(self._inputs)
        return decision

    def hand_over(self, clip_coef: Tensor | None) -> None:
        """Make the optimizer's next step read the gradients, times the clip coefficient.  # f32[] or None"""
        if clip_coef is not None:
            self._inputs = self._inputs._replace(multiplier=self._inv_scale * clip_coef)
        self._optimizer.set_step_inputs(self._inputs)

    def clear(self, *, keep: bool) -> bool:
        """After the step: drop scaled gradients. With ``keep``, unmastered ones stay, unscaled and clipped.

        Returns:
            Whether no gradient is left.
        """
        multiplier = self._inputs.multiplier
        if not self._scaled:
            if keep and multiplier is not self._inv_scale:
                own = [grad for grad in gradients_of(self._pairs.unmastered) if grad is not None]
                foreach.scale_(own, multiplier)
            return False
        kept = [(p, p.grad) for p in self._pairs.unmastered if p.grad is not None] if keep else []
        for parameter in self._inputs.model_params:
            parameter.grad = None
        if kept:
            foreach.scale_([grad for _, grad in kept], multiplier)
        for parameter, grad in kept:
            parameter.grad = grad
        return not keep


def pending_without_sentinel(
    window: Pending, table: ParamTable
) -> tuple[Pending, list[Tensor | None]] | None:
    """Remove the sentinel and return the pending gradients in the order of the groups; None after ``zero_grad()``.

    After ``zero_grad(set_to_none=False)``, the returned gradients are zeros, which the optimizer then steps.

    Raises:
        OrderError: user code wrote to the gradients, or gave masters gradients.
    """
    grads, sentinel = gradients_of(table.model_params), window.sentinel
    if not window.snapshot.holds(grads):
        refuse_edits([holder.grad for holder in window.snapshot.changed()])
    if sentinel is None:
        return None if are_none(grads) else (window, grads)
    left, changed = sentinel.holder.grad, not sentinel.unchanged()
    if changed:
        refuse_edits([left])
    sentinel.remove()
    refuse_edits(gradients_of(window.pairs.masters))
    if left is None or are_none(grads):
        return None
    if changed:
        torch._foreach_zero_([grad for grad in grads if grad is not None])
    return window._replace(sentinel=None), grads


def reads_grads_itself(optimizer: FusedOptimizer) -> bool:
    """Whether the step of an optimizer may read gradients outside of ``.grad`` and write low parameters itself.

    False if a foreign step hook or a subclass's own ``step`` may read gradients before it or write masters after it.
    """
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
    )
    ours = (str(getattr(hook, "__module__", "")).startswith("halfpeak.engine.") for hook in hooks)
    return type(optimizer).step.__module__.startswith("halfpeak.") and all(ours)


def norm_and_coefficient(max_norm: float | None, squares: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The norm of the gradients and the clip coefficient; None without ``max_norm``.  # f32[], f32[]"""
    if max_norm is None:
        return None, None
    norm = squares.sqrt()
    return norm, reference.clip_coef(norm, max_norm)
