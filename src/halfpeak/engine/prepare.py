"""prepare: from models, optimizers and an opt level to an Engine. Checks everything, then changes something."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import DeviceCasts, OpCasts
from halfpeak.casting.float8 import check_float8, from_float8, to_float8
from halfpeak.casting.modules import convert_network, converted_parameters
from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.levels import LevelName, resolve
from halfpeak.core.optimizer_state import PER_ELEMENT
from halfpeak.core.policy import Float8, Float8Recipe, KeepFp32, NormRule, Policy, parse_modules
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.short_repr import short_repr
from halfpeak.core.suitable import level_for
from halfpeak.core.torch_compat import refuse_inference_mode
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.diagnosis.skips import OnSkip, watch_for
from halfpeak.engine.engine import Engine
from halfpeak.engine.model_hooks import hook
from halfpeak.engine.optimizer import prepared_of
from halfpeak.engine.validation import (
    check_keep_fp32,
    check_models,
    check_optimizers,
    check_remainders,
    uncompiled,
    vanished_eps,
)
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.shards import has_process_group, is_shard
from halfpeak.state.clip import Clip, parse_clip
from halfpeak.state.found_inf import FoundInfReducer, Group, is_multi_rank
from halfpeak.state.grad_buffers import GradBufferPool
from halfpeak.state.masters import Masters
from halfpeak.state.remainder_store import remainder_store_of

OpLists = Literal["apex", "torch"]
"""Whose lists say what operations compute in."""


@known_keywords
def prepare(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    level: LevelName = "auto",
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
    shadow_weights: bool | None = None,
    release_gradients: bool | None = None,
    keep_gradient_memory: bool | None = None,
    keep_fp32: Sequence[KeepFp32] = (),
    float8: Float8 | Float8Recipe | None = None,
    group: Group = None,
    check_ranks: int | None = None,
    on_skip: Literal["warn", "diagnose"] | OnSkip | None = "warn",
) -> Engine:
    """Convert models and optimizers in place for an opt level and return the engine that takes their steps.

    Call it after the models are on their device, before ``DistributedDataParallel`` wraps them, and after
    :func:`halfpeak.distributed.fully_shard`, whose float32 shards stay what the optimizer steps; ``torch.compile`` may come
    before or after. Everything is checked first: a refused call leaves models and optimizers as they were.

    Args:
        models: one module or several.
        optimizers: torch optimizers over their parameters. At levels with master weights their groups hold float32
            masters afterwards, in place of low parameters.
        level: ``"O0"`` to ``"O5"``; see :data:`halfpeak.LEVELS`. ``"auto"`` takes the one that suits the device of the
            parameters, O5 where it computes in bfloat16 and O2 elsewhere, and logs it once at ``logging.INFO``.
        cast_model_type: overrides the level; likewise the next four.
        patch_torch_functions: cast per operation (O1, O4 only).
        keep_batchnorm_fp32: leave normalisation layers in float32.
        master_weights: step float32 copies of low parameters.
        loss_scale: a number, or ``"dynamic"``.
        cast_model_outputs: dtype of what ``forward`` returns; None means float32 at levels that cast the model.
        norms: which layers stay float32: ``"all"`` normalisation layers, or ``"batchnorm"``, apex's rule.
        scale: bounds, factors and window of the loss scale; None means ``ScaleConfig(recovers=True)``.
        num_losses: number of independent loss scalers; ``engine.backward(loss, loss_id=...)`` chooses.
        accumulate: backward passes per step, or an :class:`~halfpeak.Accumulation`.
        clip: a number clips by global norm; or ``ClipNorm(...)``, ``ClipValue(...)``.
        restore_buffers: put batch-norm statistics back when a step is skipped.
        op_lists: by which lists operations are cast at O1 and O4: ``"apex"``'s, the same on every device, or ``"torch"``'s
            for the device of the model, which ``torch.autocast`` applies at less cost per operation.
        shadow_weights: deprecated, without effect: a forward pass caches the casts of its weights in any case.
        release_gradients: deprecated, without effect: it saved memory only in windows of several passes.
        keep_gradient_memory: whether the float32 gradients of masters keep their memory from step to step, 4 bytes per
            parameter. None keeps it on the CPU, where mapping new memory would take longer than all else that is done
            with gradients: with torch's optimizers, and with those of :mod:`halfpeak.fused` where ``accumulate`` sums in
            it, but never with remainders, which are there to save memory.
        keep_fp32: modules that are stored and computed in float32, with all inside them: classes, patterns of qualified names
            such as ``"head.*"``, or functions of name and module. :func:`halfpeak.diagnose` says which are worth it.
        float8: O5 only: linear layers whose sizes are divisible by 16 multiply in float8, by torchao's recipe of that name,
            ``"tensorwise"``, ``"rowwise"`` or ``"rowwise_with_gw_hp"``; or a :class:`~halfpeak.Float8`, which
            leaves layers out. Weights, masters and checkpoints are those of O5. A GPU must have float8; the CPU emulates it.
        group: ranks that must agree on skipping although their gradients are not reduced over all of them; None where
            ``DistributedDataParallel`` reduces every gradient. Mark parameters that other ranks do not have (experts,
            pipeline stages) by ``parameter.allreduce = False``: a norm to clip by is then one of all ranks.
        check_ranks: call :meth:`halfpeak.Engine.check_ranks` after so many steps, and after a step that raises in their
            place.
        on_skip: what is done about skipped steps that are not the usual search for a loss scale, a scale near its floor, and
            more than 5 % of skips in 200 steps. ``"warn"`` logs a line to ``"halfpeak"``, each kind at most once in 1,000
            steps, and waits for nothing; ``"diagnose"`` replays the step and writes ``diagnosis-<step>.html``, and waits for
            each step to know; a function is called with the engine and a :class:`~halfpeak.engine.diagnosis.skips.SkipEvent`.

    Warns:
        UserWarning: the ``eps`` of an optimizer or a norm is zero in the dtype that it is used in, with the value to write.

    Raises:
        ConfigError: an unknown level, or an override it does not allow.
        ConfigTypeError: an unknown keyword; the message names the one that is near.
        ParameterError: a model or optimizer that cannot be prepared.
        MissingExtraError: ``float8`` without torchao.

    Example:
        >>> import torch, halfpeak
        >>> model = torch.nn.Linear(4, 2)
        >>> engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with engine.forward():
        ...     loss = model(torch.ones(3, 4)).square().mean()
        >>> engine.backward(loss)
        >>> engine.step().stepped()
        True
    """
    for name, given in (("shadow_weights", shadow_weights), ("release_gradients", release_gradients)):
        if given is not None:
            warnings.warn(f"{name} has no effect any more; leave it out", DeprecationWarning, stacklevel=3)
    listed, optimizers = _listed(models, nn.Module), _listed(optimizers, Optimizer)
    properties = resolve(
        level_for(level, [model for model in listed if isinstance(model, nn.Module)]),
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    config = EngineConfig(
        properties=properties,
        policy=replace(
            properties.policy(norms=norms, output=cast_model_outputs),
            keep_fp32=parse_modules("keep_fp32", keep_fp32),
            float8=float8 if float8 is None or isinstance(float8, Float8) else Float8(float8),
        ),
        scale=properties.scale_config(scale or ScaleConfig(recovers=True)),
        num_losses=num_losses,
        accumulation=accumulate if isinstance(accumulate, Accumulation) else Accumulation(every=accumulate),
        clip=parse_clip(clip),
        restore_buffers=restore_buffers,
        keep_gradient_memory=keep_gradient_memory,
        check_ranks=check_ranks,
    )
    if check_ranks is not None and not has_process_group():
        raise ConfigError(
            f"check_ranks={short_repr(check_ranks)} needs torch.distributed; call "
            "torch.distributed.init_process_group first, or leave it out"
        )
    watch = watch_for(on_skip)
    engine = build(
        config,
        listed,
        optimizers,
        casts=_parse_op_lists(config.policy, op_lists),
        reducer=FoundInfReducer(group),
    )
    for message in vanished_eps(engine.models, engine.optimizers, config.policy):
        warnings.warn(message, stacklevel=3)
    if watch is not None:
        watch.attach(engine)
    return engine


def build(
    config: EngineConfig,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    casts: OpCasts | Literal["torch"] | None = None,
    reducer: FoundInfReducer | None = None,
) -> Engine:
    """What every front end calls: prepare from a config. See :func:`prepare`.

    Args:
        config: what to do.
        models: converted in place.
        optimizers: given masters in place.
        casts: the casting scope of a per-operation policy; None makes one, ``"torch"`` one of ``torch.autocast``.
        reducer: of ``found_inf`` over ranks; None leaves each rank to itself.
    """
    refuse_inference_mode("prepare()")
    policy = config.policy
    models = [uncompiled(model) for model in models]
    check_models(models, policy)
    check_keep_fp32(models, policy)
    check_float8(models, policy)
    check_optimizers(optimizers, models, policy)
    check_remainders(optimizers, policy)
    casting: AbstractContextManager[Any] = nullcontext()
    if policy.per_op and policy.compute is not None:
        if casts == "torch":
            casting = DeviceCasts(_home(models, optimizers).type, policy.compute)
        else:
            casting = casts or OpCasts(policy.compute)
    buffers = GradBufferPool() if _keeps_memory(config, optimizers, _home(models, optimizers)) else None
    masters = Masters(wanted=policy.masters, grad_buffers=buffers)
    handles: list[RemovableHandle] = []
    with ExitStack() as undo:
        undo.callback(_remove, handles)
        values = _exact_values(models, optimizers, policy) if policy.masters else {}
        for model in models:
            _convert(model, policy, undo)
            undo.callback(from_float8, model, policy)
            to_float8(model, policy)
            handles += hook(model, policy, masters)
        for optimizer in optimizers:
            if policy.masters:
                undo.callback(masters.release, optimizer)
                masters.adopt(optimizer, values)
            elif policy.param is not None and not isinstance(optimizer, FusedOptimizer):
                _cast_state(optimizer)
        engine = Engine(
            config,
            models,
            optimizers,
            masters=masters,
            casting=casting,
            reducer=reducer or FoundInfReducer(),
            device=_home(models, optimizers),
            handles=handles,
        )
        undo.pop_all()
    return engine


def _keeps_memory(config: EngineConfig, optimizers: Sequence[Optimizer], device: torch.device) -> bool:
    if config.keep_gradient_memory is not None:
        return config.keep_gradient_memory
    # On an accelerator, the allocator keeps it.
    if device.type != "cpu" or any(remainder_store_of(optimizer) is not None for optimizer in optimizers):
        return False
    fused = all(isinstance(optimizer, FusedOptimizer) for optimizer in optimizers)
    return not fused or config.accumulation.every > 1 or not config.engine_steps


def _parse_op_lists(policy: Policy, op_lists: OpLists) -> Literal["torch"] | None:
    if op_lists not in get_args(OpLists):
        raise ConfigError(
            f"op_lists={short_repr(op_lists)} must be one of {', '.join(map(repr, get_args(OpLists)))}"
        )
    if op_lists == "apex":
        return None
    if not policy.per_op or policy.compute is None:
        raise ConfigError(
            f"op_lists={short_repr(op_lists)} is for casts per operation; leave it out, or use level 'O1' or 'O4'"
        )
    if policy.keep_fp32:
        raise ConfigError(
            "keep_fp32 suspends halfpeak's own casts per operation, not torch.autocast's; write op_lists='apex'"
        )
    return "torch"


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
    """State that a model cast left behind follows its parameter's dtype, as ``Optimizer.load_state_dict`` casts it."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            # Without a dimension it may be a counter, which stays as wide as it is.
            follows = isinstance(value, Tensor) and value.is_floating_point() and key != "step"
            if follows and (value.dim() or key in PER_ELEMENT):
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


def is_prepared(optimizer: Optimizer) -> bool:
    """Whether an engine steps, or watches the steps of, an optimizer."""
    return prepared_of(optimizer) is not None
