"""build: converts models and optimizers in place, and makes the parts of which every API is composed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import DeviceCasts, OpCasts
from halfpeak.casting.float8 import check_float8, from_float8, to_float8
from halfpeak.casting.modules import convert_network, converted_parameters
from halfpeak.core.optimizer_state import PER_ELEMENT, params_of, row_of
from halfpeak.core.policy import Policy
from halfpeak.core.torch_compat import refuse_inference_mode
from halfpeak.core.wrappers import uncompiled
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.shards import is_shard
from halfpeak.parts.batch_norm import BatchNormStats
from halfpeak.parts.checks import refuse_copies
from halfpeak.parts.found_inf import is_multi_rank
from halfpeak.parts.grad_buffers import GradBufferPool
from halfpeak.parts.model_hooks import hook_loads, hook_model
from halfpeak.parts.pairs import Pairs
from halfpeak.parts.parts import Parts
from halfpeak.parts.remainder_store import remainder_store_of
from halfpeak.parts.validation import (
    check_float32_weights,
    check_keep_fp32,
    check_models,
    check_optimizers,
    check_remainders,
)
from halfpeak.parts.window import Window


def build(
    policy: Policy,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    casts: OpCasts | Literal["torch"] | None = None,
    restores_buffers: bool = True,
    keeps_memory: bool = False,
    steps_low: bool = True,
    looks_at_each_pass: bool = False,
) -> Parts:
    """Convert models and optimizers in place, for one of the APIs. If it raises, nothing is changed.

    The caller sets ``scalers``, hooks the models' forward passes (:func:`~halfpeak.parts.model_hooks.hook_forward`), and takes
    part in the optimizers' own ``step()``, or refuses it (:mod:`halfpeak.parts.step_hooks`). At O1 and O4 it also enters
    ``casts_on(parts.casting)`` around a forward pass and ``casts_on(parts.op_casts)`` around a backward pass. A clip comes
    between the decision and the step. :class:`~halfpeak.parts.nonfinite.NonfiniteReport` ends a run whose scale cannot fall,
    and ``parts.abort()`` a window in which a step has raised.

    Args:
        policy: the dtype in which each thing is stored, computed and returned, and whether there are masters.
        models: converted in place.
        optimizers: given masters in place.
        casts: the scope that casts per operation; None makes one, ``"torch"`` makes one of ``torch.autocast``.
        restores_buffers: whether a skipped step restores batch-norm statistics.
        keeps_memory: whether the masters' float32 gradients of the next step get the memory of the last ones, at 4 bytes per
            parameter. Only on the CPU, where mapping new memory takes longer than all other work on gradients, while an
            accelerator's allocator keeps memory itself; and not with remainders, whose purpose is to save memory.
        steps_low: whether levels that cast operations step low weights, as apex does if a script insists.
        looks_at_each_pass: whether a pass at a scale of 1 is told what it has found, too; a step looks in any case.

    Example:
        An API for one optimizer, whose second step is skipped.

        >>> from halfpeak.core.levels import LEVELS
        >>> from halfpeak.core.schedule import ScaleConfig
        >>> from halfpeak.ops.decide import decide
        >>> from halfpeak.parts.loss_scaler import LossScaler
        >>> from halfpeak.parts.model_hooks import hook_forward
        >>> from halfpeak.parts.scaled_pass import ScaledPass
        >>> from halfpeak.parts.step_hooks import SkippedStep
        >>> from halfpeak.parts.window import loss_facts
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> level = LEVELS["O2"]
        >>> parts = build(level.policy(), [model], [optimizer])
        >>> (window,) = parts.windows
        >>> scale = level.properties.scale_config(ScaleConfig(init=8.0))
        >>> parts.scalers = [LossScaler(scale, parts.device)]
        >>> parts.handles += [hook_forward(model, parts.before_forward)]
        >>> counters = torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int32)
        >>> def train(loss):
        ...     with ScaledPass(parts, loss, parts.scalers[0]) as one:
        ...         one.loss.backward()
        ...     parts.agree()
        ...     window.unscale()
        ...     found = parts.found_inf([window])
        ...     losses = loss_facts([window], found, parts.scalers)
        ...     decision = decide(found, list(losses.values()), counters=counters)
        ...     skip = bool(decision.skip)
        ...     skipped = SkippedStep(window) if skip else None
        ...     try:
        ...         optimizer.step()
        ...     finally:
        ...         if skipped is not None:
        ...             skipped.undo_counts()
        ...         else:
        ...             parts.publish(window)
        ...     for scaler, state in zip(losses, decision.states):
        ...         scaler.state = state
        ...     parts.stats.end_step(skip)
        ...     window.drop()
        ...     return skip
        >>> inputs = torch.ones(3, 4)
        >>> [train((model(inputs).float() * factor).mean()) for factor in (1.0, 1e9, 1.0)]
        [False, True, False]
        >>> parts.scalers[0].read_scale()
        4.0
        >>> parts.remove()
    """
    refuse_inference_mode("preparing a model")
    models = [uncompiled(model) for model in models]
    check_models(models, policy)
    check_keep_fp32(models, policy)
    check_float8(models, policy)
    check_optimizers(optimizers, models, policy)
    if policy.per_op and not steps_low:
        check_float32_weights(models, optimizers)
    check_remainders(optimizers, policy)
    device = _home_of(models, optimizers)
    casting: OpCasts | DeviceCasts | None = None
    if policy.per_op and policy.compute is not None:
        casting = (
            DeviceCasts(device.type, policy.compute) if casts == "torch" else casts or OpCasts(policy.compute)
        )
    with ExitStack() as undo:
        values = _exact_values(models, optimizers, policy) if policy.masters else {}
        for model in models:
            _convert(model, policy, undo)
            undo.callback(from_float8, model, policy)
            to_float8(model, policy)
        for optimizer in optimizers:
            if policy.param is not None and not (policy.masters or isinstance(optimizer, FusedOptimizer)):
                _cast_state(optimizer)
        pairs = Pairs(optimizers, masters=bool(policy.masters), values=values)
        undo.callback(pairs.release)
        has_remainders = any(remainder_store_of(optimizer) is not None for optimizer in optimizers)
        memory = GradBufferPool() if keeps_memory and device.type == "cpu" and not has_remainders else None
        windows = [
            Window(one, pairs, models=models, memory=memory, looks_at_each_pass=looks_at_each_pass)
            for one in optimizers
        ]
        parts = Parts(
            policy=policy,
            models=tuple(models),
            pairs=pairs,
            windows=windows,
            stats=BatchNormStats(models if restores_buffers else ()),
            casting=casting,
            device=device,
        )
        undo.callback(parts.release)
        undo.callback(_remove, parts.handles)
        for model in models:
            parts.handles += hook_model(model, policy, pairs)
            parts.handles += hook_loads(model, parts.stats)
        undo.pop_all()
    if len(pairs):
        refuse_copies(optimizers)
    return parts


def _exact_values(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], policy: Policy
) -> dict[int, Tensor]:
    """The float32 values that casting will round, by ``id`` of the parameter; the masters start from them.

    Empty on several ranks, where masters start from the rounded values, as in apex: DistributedDataParallel broadcasts
    only the rounded parameters of one rank, so masters with each rank's exact values would differ for ever.
    """
    if policy.param is None or is_multi_rank():
        return {}
    trained = {id(parameter) for optimizer in optimizers for parameter in params_of(optimizer)}
    return {
        id(parameter): parameter.data
        for model in models
        for parameter in converted_parameters(model, policy.param, policy.norms, policy.keep_fp32)
        if id(parameter) in trained and parameter.dtype is torch.float32
    }


def _convert(model: nn.Module, policy: Policy, undo: ExitStack) -> None:
    if policy.param is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if is_shard(tensor):
            continue
        undo.callback(setattr, tensor, "data", tensor.data)
        if tensor.grad is not None:
            undo.callback(setattr, tensor.grad, "data", tensor.grad.data)
    convert_network(model, policy.param, policy.norms, policy.keep_fp32)


def _cast_state(optimizer: Optimizer) -> None:
    """Cast optimizer state to the dtype of its cast parameter, as ``Optimizer.load_state_dict`` does."""
    for parameter in optimizer.state:
        state = row_of(optimizer, parameter)
        for key, value in state.items():
            # A tensor without dimensions may be a counter, which keeps its dtype.
            follows = isinstance(value, Tensor) and value.is_floating_point() and key != "step"
            if follows and (value.dim() or key in PER_ELEMENT):
                state[key] = value.to(parameter.dtype)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _home_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> torch.device:
    """The device of the scalars of a step: that of the first parameter."""
    for optimizer in optimizers:
        for parameter in params_of(optimizer):
            return parameter.device
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")
