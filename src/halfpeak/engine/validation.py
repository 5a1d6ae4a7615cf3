"""What can be prepared, and which state can be loaded. Every function here only looks, so a refusal has changed nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfpeak.casting.modules import is_prepared
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, ParameterError, StateError
from halfpeak.core.policy import Policy
from halfpeak.distributed.fsdp import check_shards
from halfpeak.distributed.optimizer_state import has_moments
from halfpeak.engine.context import EngineContext
from halfpeak.engine.optimizer import PreparedOptimizer, prepared_of
from halfpeak.fused.base import FusedOptimizer
from halfpeak.state.masters import params_of
from halfpeak.state.remainder_store import remainder_store_of
from halfpeak.state.state_dict_hooks import has_fp32_state_dict

_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")

VERSION: Final = 1
_KEYS: Final = ("version", "level", "models", "optimizers", "scalers", "counters", "buffers", "window")
_WINDOW_KEYS: Final = ("phase", "found_inf", "true_sized", "scaled", "frozen", "parked")
_PHASES: Final = ("CLEAN", "UNSCALED", "SCALED")
_PER_ELEMENT: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def check_models(models: Sequence[Any], policy: Policy) -> None:
    """Check the models.

    Raises:
        ConfigTypeError: not a module.
        OrderError: prepared before.
        ParameterError: wrapped, so that casting its parameters would break the wrapper; or without storage.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(
                f"{type(model).__name__} is not a torch.nn.Module; pass a module or a list of modules"
            )
        part = next((name for name, part in model.named_modules() if has_fp32_state_dict(part)), None)
        if part is not None or is_prepared(model):
            what = f"{type(model).__name__}, part {part!r}," if part else type(model).__name__
            raise OrderError(
                f"{what} was prepared before; prepare all models that share parts in one call, call engine.remove() on "
                "the engine of the first, or build a new model"
            )
        wrapper = wrapper_of(model)
        if wrapper is not None and (policy.param is not None or policy.masters):
            raise ParameterError(
                f"{type(model).__name__} is wrapped by {wrapper}, which must come after the parameters are cast: prepare "
                "the inner module, then wrap it"
            )
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                raise ParameterError(
                    f"parameter {name} has no storage (device meta); materialise the model first"
                )
            if policy.masters and is_lazy(parameter):
                raise ParameterError(
                    f"parameter {name} has no shape yet (lazy module); run one forward pass before preparing"
                )
        check_shards(model, policy)
    if len({id(model) for model in models}) != len(models):
        raise ParameterError("the same model was passed twice")


def check_optimizers(optimizers: Sequence[Any], models: Sequence[nn.Module], policy: Policy) -> None:
    """Check the optimizers.

    Raises:
        ConfigTypeError: not an optimizer.
        OrderError: prepared before.
        ParameterError: none of its parameters belongs to the models; or it shards its state, where it is to step masters.
    """
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigTypeError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer; pass a bare optimizer or a list of them"
            )
        if prepared_of(optimizer) is not None:
            raise OrderError(
                f"{type(optimizer).__name__} was prepared before; call engine.remove() on its engine first, or build a "
                "new optimizer"
            )
        if policy.masters and any(
            cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__
        ):
            raise ParameterError(
                "ZeroRedundancyOptimizer steps the parameters by an optimizer of its own, which would never see float32 "
                "masters; shard the model by halfpeak.distributed.fully_shard(model, level) and pass a plain optimizer"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if models and parameters and not any(id(parameter) in known for parameter in parameters):
            raise ParameterError(
                f"no parameter of {type(optimizer).__name__} belongs to the models; build the optimizer over "
                "model.parameters() of the same model objects, after moving them to their device"
            )
        for parameter in parameters:
            if not parameter.is_leaf:
                raise ParameterError(
                    f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is computed from "
                    "others, not a leaf; build the optimizer over parameters"
                )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise ParameterError("the same optimizer was passed twice")


def check_remainders(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Check the optimizers that keep remainders instead of masters.

    Raises:
        ConfigError: the policy stores weights in a dtype whose remainders are not exact, or wants no masters.
        ParameterError: another optimizer steps one of the weights, too.
    """
    for optimizer in optimizers:
        if remainder_store_of(optimizer) is None:
            continue
        name, own = type(optimizer).__name__, set(map(id, params_of(optimizer)))
        dtypes = {policy.param, *(p.dtype for p in params_of(optimizer) if is_low(p))}
        if torch.float16 in dtypes:
            raise ConfigError(
                f"{name} keeps remainders of bfloat16 weights, and these are float16, whose range is smaller than that of "
                "float32; use level 'O5' or cast_model_type=torch.bfloat16, or leave out master="
            )
        if policy.param is torch.bfloat16 and not policy.masters:
            raise ConfigError(
                f"{name} keeps what bfloat16 weights round away, and this level wants no master weights; use level 'O5', or "
                "leave out master="
            )
        if any(id(p) in own for other in optimizers if other is not optimizer for p in params_of(other)):
            raise ParameterError(
                f"{name} keeps remainders of its weights, which another optimizer would move without them; give each "
                "parameter to one optimizer, or leave out master="
            )


def wrapper_of(model: nn.Module) -> str | None:
    """The name of the parallel or compiling wrapper that ``model`` is, or None."""
    for cls in type(model).__mro__:
        if cls.__name__ in _WRAPPERS and cls.__module__.partition(".")[0] in ("torch", "apex"):
            return f"{cls.__module__}.{cls.__name__}"
    return None


def uncompiled(model: Any) -> Any:
    """The module that ``torch.compile(model)`` wraps, or ``model`` itself. What was compiled is traced anew when it runs."""
    while isinstance(model, nn.Module) and (wrapper_of(model) or "").endswith(".OptimizedModule"):
        model = model._orig_mod
    return model


def is_low_model(model: nn.Module) -> str | None:
    """The name of the first low parameter or buffer, or None."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return f"{name} ({tensor.dtype})"
    return None


def check_state(context: EngineContext, state: object) -> None:
    """Check what :func:`halfpeak.engine.state_dict.load_state` would restore.

    Raises:
        StateError: it does not fit.
    """
    known = _mapping(state, "an engine's state", _KEYS)
    if known["version"] != VERSION:
        raise StateError(
            f"state version {known['version']!r} is not {VERSION}; it was saved by another halfpeak"
        )
    for model, saved in zip(
        context.models, _listed(known["models"], "models", len(context.models)), strict=True
    ):
        _check_model(model, saved)
    optimizers = _listed(known["optimizers"], "optimizers", len(context.prepared))
    for optimizer, saved in zip(context.optimizers, optimizers, strict=True):
        check_optimizer(optimizer, saved)
    _check_moments(context.optimizers, optimizers, _mapping(known["counters"], "the counters"))
    for scaler, saved in zip(
        context.scalers, _listed(known["scalers"], "scalers", len(context.scalers)), strict=True
    ):
        scaler.parse(saved)
    for name, value in _mapping(known["counters"], "the counters", ("taken", "skipped", "index")).items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31 - 1:
            raise StateError(f"the counter {name} must be an integer of 0 or more, not {value!r}")
    for flat in _listed(known["buffers"], "saved statistics"):
        _require_tensor(flat, "a saved statistic")
    check_window(context, known["window"])


def _check_moments(
    optimizers: Sequence[Optimizer], saved: Sequence[Any], counters: Mapping[Any, Any]
) -> None:
    """A state in which optimizers have stepped holds what one of them keeps from step to step.

    Raises:
        StateError: it does not: the run would go on with moments of zero.
    """
    if (
        counters.get("taken")
        and not any(state["state"] for state in saved)
        and any(map(has_moments, optimizers))
    ):
        raise StateError(
            f"the state is of {counters['taken']} steps and holds no moments of any optimizer; a distributed checkpoint is "
            "read into the tensors that are there: call torch.distributed.init_process_group before dcp.load"
        )


def check_optimizer(optimizer: Optimizer, saved: object) -> None:
    """Check an optimizer's state before it is loaded.

    Raises:
        StateError: its groups or its tensors have other sizes, or something in it is no data.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise StateError("an optimizer's state must be a dict with 'state' and 'param_groups'")
    groups = [_mapping(group, "a parameter group") for group in _listed(saved["param_groups"], "groups")]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(_listed(group.get("params"), "parameters of a group")) for group in groups]
    if sizes != given:
        raise StateError(f"the optimizer's groups hold {sizes} parameters, those of the state {given}")
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for name, value in group.items():
            if _is_number(own.get(name)) and not _is_number(value) and not isinstance(value, Tensor):
                raise StateError(f"{name}={value!r} in the state's parameter group must be a number")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in _mapping(saved["state"], "the state of an optimizer's parameters").items():
        if isinstance(index, int):
            if not 0 <= index < len(parameters):
                raise StateError(f"the state speaks of parameter {index} of {len(parameters)}")
            _check_entries(index, parameters[index], entries)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.check_state(saved)


def check_window(context: EngineContext, window: object) -> None:
    """Check what :func:`halfpeak.engine.state_dict.load_window` would restore.

    Raises:
        StateError: it does not fit.
    """
    known = _mapping(window, "the state's window", ("lanes", "losses"))
    windows = _listed(known["lanes"], "optimizers in its window", len(context.prepared))
    for prepared, saved in zip(context.prepared, windows, strict=True):
        _check_one_window(
            prepared, _mapping(saved, "a window of the state", _WINDOW_KEYS), len(context.scalers)
        )
    for index, found_inf in _mapping(known["losses"], "the losses of the state's window").items():
        _require_loss(index, len(context.scalers))
        _require_tensor(found_inf, "the found_inf of a loss", ())


def _check_model(model: nn.Module, saved: object) -> None:
    given = _mapping(saved, "a model's state")
    own = model.state_dict()
    if set(given) != set(own):
        missing, unexpected = sorted(set(own) - set(given)), sorted(map(str, set(given) - set(own)))
        raise StateError(
            f"the model's state does not fit: missing {missing[:5]}, unexpected {unexpected[:5]}"
        )
    for key, value in own.items():
        if isinstance(value, Tensor):
            found = _require_tensor(given[key], key, tuple(value.shape))
            if found.is_floating_point() != value.is_floating_point():
                raise StateError(f"{key} is {found.dtype} in the state and {value.dtype} in the model")


def _check_entries(index: int, parameter: Tensor, entries: object) -> None:
    for name, value in _mapping(entries, f"the state of parameter {index}").items():
        if isinstance(value, (str, bytes)):
            raise StateError(f"{name} of parameter {index} is {value!r}")
        if name in _PER_ELEMENT and isinstance(value, Tensor) and value.dim() > 0:
            _require_tensor(value, f"{name} of parameter {index}", tuple(parameter.shape))


def _check_one_window(prepared: PreparedOptimizer, saved: Mapping[str, Any], losses: int) -> None:
    pairs = prepared.table().all_pairs
    phase, scale = saved["phase"], saved["frozen"]
    if phase not in _PHASES:
        raise StateError(f"unknown phase {phase!r} in the state's window; allowed: {', '.join(_PHASES)}")
    if (phase == "SCALED") != (scale is not None):
        raise StateError(
            f"the state's window is {phase} and its scale {scale!r}; only SCALED gradients have one"
        )
    _require_tensor(saved["found_inf"], "found_inf", ())
    for name in ("true_sized", "scaled", "parked"):
        for index, grad in _mapping(saved[name], f"the {name} gradients of the state's window").items():
            if not isinstance(index, int) or not 0 <= index < len(pairs):
                raise StateError(f"gradient {index!r} ({name}) of the state's window fits no parameter")
            _require_tensor(grad, f"gradient {index} ({name})", tuple(pairs[index].main.shape))
    if scale is not None:
        loss, value = _listed(scale, "parts of a waiting scale", 2)
        _require_loss(loss, losses)
        _require_tensor(value, "a waiting scale", ())


def _mapping(value: object, what: str, keys: tuple[str, ...] | None = None) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise StateError(f"{what} must be a dict, not {type(value).__name__}; pass engine.state_dict()")
    if keys is not None and set(value) != set(keys):
        found = sorted(map(str, value))
        raise StateError(f"{what} has the keys {sorted(keys)}, not {found}; pass engine.state_dict()")
    return value


def _listed(value: object, what: str, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise StateError(f"the {what} of the state must be a list, not {type(value).__name__}")
    if length is not None and len(value) != length:
        raise StateError(f"the state holds {len(value)} {what}, the engine {length}")
    return value


def _require_tensor(value: object, what: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if not isinstance(value, Tensor):
        raise StateError(f"{what} is {type(value).__name__} in the state and should be a tensor")
    if shape is not None and tuple(value.shape) != shape:
        raise StateError(f"{what} is {tuple(value.shape)} in the state and should be {shape}")
    return value


def _require_loss(index: object, losses: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < losses:
        raise StateError(f"the state's window names loss {index!r} of {losses}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
