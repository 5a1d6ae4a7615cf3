"""The inputs of a fused step, and the decision to step or skip, as values that an engine passes and gets back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfpeak.core.decide import clip_coef_of_number
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance
from halfpeak.core.torch_compat import host_values, single


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
            :func:`~halfpeak.core.schedule.advance` for 2.  # f32[]
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


def decide_on_host(
    inputs: DecisionInputs, sum_squares: Tensor, found_inf: Tensor, multiplier: Tensor
) -> StepDecision | None:
    """Decide in Python numbers whether to step, from the measured gradients.

    The result is bitwise equal to the same operations on float32 tensors: :func:`~halfpeak.core.schedule.advance` and
    :func:`~halfpeak.core.decide.clip_coef`. Thirty operations on scalar tensors would take longer than a kernel.

    Args:
        inputs: the values known before measuring.
        sum_squares: the sum of squares of the unscaled gradients.  # f32[]
        found_inf: 1 if a gradient is not finite.                   # f32[]
        multiplier: the factor that unscales the gradients.         # f32[]

    Returns:
        None if a number is not in host memory.

    Example:
        >>> config, zero, i = ScaleConfig(init=8.0), torch.zeros(()), torch.zeros((), dtype=torch.int32)
        >>> inputs = DecisionInputs(config, config.start(), i, i, zero, max_norm=1.0)
        >>> decision = decide_on_host(inputs, torch.tensor(16.0), zero, torch.tensor(0.125))
        >>> decision.grad_norm, decision.multiplier
        (tensor(4.), tensor(0.0312))
    """
    known = host_values(found_inf, inputs.found_inf, multiplier, inputs.num_steps, inputs.num_skipped)
    # The tensor's sqrt, because math.sqrt can differ in the last bit and the norm must match other code paths.
    root = sum_squares.sqrt()
    norms = host_values(root)
    if known is None or norms is None:
        return None
    measured, found_before, times, num_steps, num_skipped = known
    skips, (norm,) = bool(measured or found_before), norms
    if inputs.max_norm is not None:
        skips = skips or not math.isfinite(norm)
        times = single(times * clip_coef_of_number(norm, inputs.max_norm))
    skip = _float(skips)
    return StepDecision(
        skip,
        root,
        _float(times),
        advance(inputs.config, inputs.state, inputs.found_inf if found_before else skip),
        inputs.num_steps if skips else torch.scalar_tensor(num_steps + 1, dtype=torch.int32, device="cpu"),
        torch.scalar_tensor(num_skipped + 1, dtype=torch.int32, device="cpu")
        if skips
        else inputs.num_skipped,
    )


def _float(number: float) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32, device="cpu")
