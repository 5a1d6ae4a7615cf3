"""FusedStep: the step of an optimizer of :mod:`halfpeak.fused` whose kernels read gradients where autograd has left them."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfpeak.core.decide import Decision, LossFacts
from halfpeak.engine.counters import Counters
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import DecisionInputs, StepDecision, StepInputs
from halfpeak.ops.foreach import can_stay, gradients_of
from halfpeak.ops.shards import local_gradients
from halfpeak.parts.clip import Clip, is_by_norm, is_rank_local, limit_of_norm
from halfpeak.parts.found_inf import FoundInfReducer
from halfpeak.parts.parts import Parts
from halfpeak.parts.step_hooks import is_own_hook, passing_found_inf


class FusedStep:
    """Measures, decides and steps by the kernels of one optimizer, which unscale and clip gradients as they read them.

    Args:
        parts: of the engine, whose only optimizer it is.
        optimizer: the optimizer.
        clip: by the 2-norm, or none.
        reducer: reduces ``found_inf`` over ranks.
    """

    def __init__(self, parts: Parts, optimizer: FusedOptimizer, clip: Clip, reducer: FoundInfReducer) -> None:
        self._pairs, self._device, (self._window,) = parts.pairs, parts.device, parts.windows
        self._optimizer, self._max_norm, self._reducer = optimizer, limit_of_norm(clip), reducer

    def reads_gradients_in_place(self) -> bool:
        """Whether the coming step reads the gradients where they are, so that a pass may leave them scaled."""
        if not calls_no_other_code(self._optimizer):
            return False
        return self._reducer.is_local or not any(map(is_rank_local, self._window.weights))

    def inputs(self) -> StepInputs | None:
        """What the kernels read: gradients where they are, scaled or not; None if they cannot."""
        if not self.reads_gradients_in_place():
            return None
        weights = self._window.weights
        grads = gradients_of(weights)
        present = [grad for grad in grads if grad is not None]
        if not present or not can_stay(present):
            return None
        if self._window.held is None:
            inverse_scale = torch.ones((), dtype=torch.float32, device=self._device)
        else:
            inverse_scale = self._window.held.scale.reciprocal()
        return StepInputs(local_gradients(grads, weights), weights, inverse_scale)

    @property
    def decides(self) -> bool:
        """Whether the kernels decide, too, so that the host need not take part; over ranks it must."""
        return self._reducer.is_local and self._optimizer.backend == "triton"

    def decide(self, inputs: StepInputs, loss: LossFacts, counters: Counters) -> StepDecision | None:
        """Measure and decide on the device; None with shards."""
        return self._optimizer.decide(
            inputs,
            DecisionInputs(
                loss.config, loss.state, counters.num_steps, counters.num_skipped, loss.found, self._max_norm
            ),
        )

    def measure(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """``found_inf`` of the gradients on this rank, and the norm of all; None if the clip needs none.  # f32[], f32[]"""
        squares, found = self._optimizer.measure(inputs)
        if self._max_norm is None:
            return found, None
        if not self._reducer.is_local:
            squares = squares + self._reducer.sum_powers(torch.zeros_like(squares), 2)
        return found, squares.sqrt()

    def step(self, inputs: StepInputs, decision: Decision) -> None:
        """Step, or skip. The kernels write the weights with their masters."""
        coef = decision.coef
        if decision.skip is not True and not (isinstance(coef, float) and coef == 1.0):
            inputs = inputs._replace(multiplier=inputs.multiplier * coef)
        try:
            self._optimizer.set_step_inputs(inputs)
            with passing_found_inf(self._optimizer, decision.skip):
                self._optimizer.step()
        finally:
            self._optimizer.set_step_inputs(None)
            self._pairs.record_published(self._window.indices)


def fused_step_of(parts: Parts, clip: Clip, reducer: FoundInfReducer) -> FusedStep | None:
    """The step of an engine by its optimizer's own kernels; None if it has several optimizers, another one, or another clip."""
    if len(parts.windows) != 1 or not is_by_norm(clip):
        return None
    optimizer = parts.windows[0].optimizer
    return FusedStep(parts, optimizer, clip, reducer) if isinstance(optimizer, FusedOptimizer) else None


def calls_no_other_code(optimizer: FusedOptimizer) -> bool:
    """Whether a step runs halfpeak's code alone, so that it may read gradients outside of ``.grad`` and write the weights.

    False if a step hook of other code, or a subclass's own ``step``, may read gradients before it or write masters after it.
    """
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
    )
    return type(optimizer).step.__module__.startswith("halfpeak.") and all(map(is_own_hook, hooks))
