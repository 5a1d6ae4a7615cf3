"""prepare: from models, optimizers and an opt level to an Engine. Checks everything, then changes something."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.device import DeviceCasts
from halfpeak.casting.modules import convert_network, converted_parameters
from halfpeak.casting.opcasts import OpCasts
from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.levels import resolve
from halfpeak.core.policy import NormRule, Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.checks import check_keepers, check_models, check_optimizers
from halfpeak.engine.engine import Engine
from halfpeak.engine.hooks import hook
from halfpeak.engine.plan import Plan
from halfpeak.engine.release import check_release
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.parts.clip import Clip, parse_clip
from halfpeak.parts.gradient_memory import GradientMemory
from halfpeak.parts.keeper import keeper_of
from halfpeak.parts.masters import Masters
from halfpeak.parts.verdict import Group, Verdict, is_multi_rank

OpLists = Literal["apex", "torch"]
"""Whose lists say what operations compute in."""


def prepare(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    level: str = "O2",
    *,
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    norms: NormRule = "all",
    scale: ScaleConfig | None = None,
    num_losses: int = 1,
    accumulate: int | Accumulation = 1,
    clip: Clip | float | None = None,
    restore_buffers: bool = True,
    op_lists: OpLists = "apex",
    shadow_weights: bool = False,
    release_gradients: bool = False,
    keep_gradient_memory: bool | None = None,
    group: Group = None,
) -> Engine:
    """Convert models and optimizers in place for an opt level and return the engine that takes their steps.

    Call it after the models are on their device and before ``DistributedDataParallel`` or ``torch.compile`` wraps them.
    Everything is checked first: a refused call leaves models and optimizers as they were.

    Args:
        models: one module or several.
        optimizers: torch optimizers over their parameters. At levels with master weights their groups hold float32
            masters afterwards, in place of low parameters.
        level: ``"O0"`` to ``"O5"``; see :data:`halfpeak.LEVELS`.
        cast_model_type: overrides the level; likewise the next four.
        patch_torch_functions: cast per operation (O1, O4 only).
        keep_batchnorm_fp32: leave normalisation layers in float32.
        master_weights: step float32 copies of low parameters.
        loss_scale: a number, or ``"dynamic"``.
        cast_model_outputs: dtype of what ``forward`` returns; None means float32 at levels that cast the model.
        norms: which layers stay float32: ``"all"`` normalisation layers, or ``"batchnorm"``, apex's rule.
        scale: bounds, factors and window of the loss scale.
        num_losses: number of independent loss scalers; ``engine.backward(loss, loss_id=...)`` chooses.
        accumulate: backward passes per step, or an :class:`~halfpeak.Accumulation`.
        clip: a number clips by global norm; or ``ClipNorm(...)``, ``ClipValue(...)``.
        restore_buffers: put batch-norm statistics back when a step is skipped.
        op_lists: by which lists operations are cast at O1 and O4: ``"apex"``'s, the same on every device, or ``"torch"``'s
            for the device of the model, which ``torch.autocast`` applies at less cost per operation.
        shadow_weights: at O1 and O4 cast each weight once per step and hold the copy for all backward passes of the step
            and their recomputed checkpoints, for 2 bytes per parameter. An optimizer of :mod:`halfpeak.fused` writes the
            copies in its step, so that none is cast any more. A weight that is written in place through ``.data`` outside of
            a forward pass is not noticed: call ``engine.casting.clear_cache()`` after it.
        release_gradients: take gradients in while backward goes on, bucket by bucket, so that no backward pass of a window
            holds all of its gradients beside their sum. With one optimizer of :mod:`halfpeak.fused`, on one rank. Weights
            come out the same, bit for bit; a backward pass that raises in the middle of a window drops the window.
        keep_gradient_memory: whether the float32 gradients of masters keep their memory from step to step, 4 bytes per
            parameter. None keeps it on the CPU, where mapping new memory would take longer than all else that is done
            with gradients: with torch's optimizers, and with those of :mod:`halfpeak.fused` where ``accumulate`` sums in
            it, but never with remainders, which are for who needs the memory.
        group: ranks that must agree on skipping although their gradients are not reduced over all of them; None where
            ``DistributedDataParallel`` reduces every gradient.

    Raises:
        ConfigError: an unknown level, or an override it does not allow.
        ParameterError: a model or optimizer that cannot be prepared.

    Example:
        >>> import torch, halfpeak
        >>> model = torch.nn.Linear(4, 2)
        >>> engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
        >>> with engine.forward():
        ...     loss = model(torch.ones(3, 4)).square().mean()
        >>> engine.backward(loss)
        >>> engine.step().stepped()
        True
    """
    properties = resolve(
        level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    plan = Plan(
        properties=properties,
        policy=properties.policy(norms=norms, output=cast_model_outputs),
        scale=properties.scale_config(scale),
        num_losses=num_losses,
        accumulation=accumulate if isinstance(accumulate, Accumulation) else Accumulation(every=accumulate),
        clip=parse_clip(clip),
        restore_buffers=restore_buffers,
        release_gradients=release_gradients,
        keep_gradient_memory=keep_gradient_memory,
    )
    return build(
        plan,
        _listed(models, nn.Module),
        _listed(optimizers, Optimizer),
        casts=_parse_casts(plan.policy, op_lists, shadow_weights=shadow_weights),
        verdict=Verdict(group),
    )


def build(
    plan: Plan,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    casts: OpCasts | Literal["torch"] | None = None,
    verdict: Verdict | None = None,
) -> Engine:
    """What every door calls: prepare from a plan. See :func:`prepare`.

    Args:
        plan: what to do.
        models: converted in place.
        optimizers: given masters in place.
        casts: the casting scope of a per-operation policy; None makes one, ``"torch"`` one of ``torch.autocast``.
        verdict: how ranks agree on skipping; None does not ask them.
    """
    policy = plan.policy
    check_models(models, policy)
    check_optimizers(optimizers, models)
    check_keepers(optimizers, policy)
    if plan.release_gradients:
        check_release(models, optimizers)
    casting: AbstractContextManager[Any] = nullcontext()
    if policy.per_op and policy.compute is not None:
        if casts == "torch":
            casting = DeviceCasts(_home(models, optimizers).type, policy.compute)
        else:
            casting = casts or OpCasts(policy.compute)
    memory = GradientMemory() if _keeps_memory(plan, optimizers, _home(models, optimizers)) else None
    masters = Masters(wanted=policy.masters, memory=memory)
    handles: list[RemovableHandle] = []
    with ExitStack() as undo:
        undo.callback(_remove, handles)
        values = _exact_values(models, optimizers, policy) if policy.masters else {}
        for model in models:
            _convert(model, policy, undo)
            handles += hook(model, policy, masters)
        for optimizer in optimizers:
            if policy.masters:
                undo.callback(masters.release, optimizer)
                masters.adopt(optimizer, values)
            elif policy.param is not None and not isinstance(optimizer, FusedOptimizer):
                _cast_state(optimizer)
        engine = Engine(
            plan,
            models,
            optimizers,
            masters=masters,
            casting=casting,
            verdict=verdict or Verdict(),
            device=_home(models, optimizers),
            handles=handles,
        )
        undo.pop_all()
    return engine


def _keeps_memory(plan: Plan, optimizers: Sequence[Optimizer], device: torch.device) -> bool:
    if plan.keep_gradient_memory is not None:
        return plan.keep_gradient_memory
    # On an accelerator, the allocator keeps it.
    if device.type != "cpu" or any(keeper_of(optimizer) is not None for optimizer in optimizers):
        return False
    fused = all(isinstance(optimizer, FusedOptimizer) for optimizer in optimizers)
    return not fused or plan.accumulation.every > 1 or not plan.steps_itself


def _parse_casts(
    policy: Policy, op_lists: OpLists, *, shadow_weights: bool
) -> OpCasts | Literal["torch"] | None:
    if op_lists not in get_args(OpLists):
        raise ConfigError(f"op_lists={op_lists!r} must be one of {', '.join(map(repr, get_args(OpLists)))}")
    if op_lists == "apex" and not shadow_weights:
        return None
    if not policy.per_op or policy.compute is None:
        raise ConfigError(
            f"op_lists={op_lists!r} and shadow_weights={shadow_weights!r} are for casts per operation; leave them out, or "
            "use level 'O1' or 'O4'"
        )
    if op_lists == "torch":
        if shadow_weights:
            raise ConfigError(
                "torch.autocast cannot be given shadow weights; leave out shadow_weights or op_lists='torch'"
            )
        return "torch"
    return OpCasts(policy.compute, shadow=True)


def _listed(given: Any, kind: type[Any]) -> list[Any]:
    if isinstance(given, kind):
        return [given]
    try:
        return list(given)
    except TypeError:
        raise ConfigTypeError(
            f"{type(given).__name__} is neither a torch {kind.__name__} nor a list of them; write prepare(model, optimizer, "
            "'O2'), the model first"
        ) from None


def _exact_values(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], policy: Policy
) -> dict[int, Tensor]:
    """The float32 values, by parameter, that casting the models will round: what the masters start from.

    With several ranks the masters start from the rounded values, as in apex: DistributedDataParallel then broadcasts
    the rounded parameters of one rank, and masters that kept what each rank had rounded away would differ for ever.
    """
    if policy.param is None or is_multi_rank():
        return {}
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        id(parameter): parameter.data
        for model in models
        for parameter in converted_parameters(model, policy.param, policy.norms)
        if id(parameter) in trained and parameter.dtype is torch.float32
    }


def _convert(model: nn.Module, policy: Policy, undo: ExitStack) -> None:
    if policy.param is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        undo.callback(setattr, tensor, "data", tensor.data)
        if tensor.grad is not None:
            undo.callback(setattr, tensor.grad, "data", tensor.grad.data)
    convert_network(model, policy.param, policy.norms)


def _cast_state(optimizer: Optimizer) -> None:
    """State that a model cast left behind follows its parameter's dtype, as ``Optimizer.load_state_dict`` casts it."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                state[key] = value.to(parameter.dtype)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _home(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> torch.device:
    """Where the scalars of a step live: with the first parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")
