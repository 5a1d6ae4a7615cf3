"""The inputs of a fused step, and the decision to step or skip, as values that an engine passes and gets back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from halfpeak.core.schedule import ScaleConfig, ScaleState


class StepInputs(NamedTuple):
    """The tensors that a step reads instead of the parameters' own gradients. Lists are in the order of the groups.

    Attributes:
        grads: the gradient for each parameter, or None.
        model_params: the model's weight for each parameter that is a master, else the parameter itself.
        multiplier: the factor that unscales and clips each gradient before the rule reads it.  # f32[]
    """

    grads: Sequence[Tensor | None]
    model_params: Sequence[Tensor]
    multiplier: Tensor


class DecisionInputs(NamedTuple):
    """The inputs of a decision that are known before the gradients are read.

    Attributes:
        config: the rule of the loss scale.
        state: the loss scale before the step.
        num_steps: steps taken so far.      # i32[]
        num_skipped: steps skipped so far.  # i32[]
        found_inf: a value other than zero skips the step even if all gradients are finite; see
            :func:`~halfpeak.core.schedule.advance` for 0.5.  # f32[]
        max_norm: the norm to which the gradients of all parameters together are clipped; None does not clip.
    """

    config: ScaleConfig
    state: ScaleState
    num_steps: Tensor
    num_skipped: Tensor
    found_inf: Tensor
    max_norm: float | None


class StepDecision(NamedTuple):
    """Whether to step, and all counters as they are after the step. Nothing has been applied yet.

    Attributes:
        found_inf: 1 if the step is to be skipped.            # f32[]
        grad_norm: norm of the unscaled gradients.            # f32[]
        multiplier: unscales and clips gradients.             # f32[]
        scale_state: the loss scale after the step.
        num_steps: steps taken, this one included.            # i32[]
        num_skipped: steps skipped, this one included.        # i32[]
    """

    found_inf: Tensor
    grad_norm: Tensor
    multiplier: Tensor
    scale_state: ScaleState
    num_steps: Tensor
    num_skipped: Tensor
