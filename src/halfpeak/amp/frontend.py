"""``initialize``, and the state of its loss scalers. Compatible with apex 25.04; O4 and O5 are those of its ROCm fork."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, overload

import torch
from torch import nn
from torch.optim import Optimizer

from halfpeak.amp.ambient import enter_ambient, keep_casts_out, suspend_casts_in_step
from halfpeak.amp.properties import Properties
from halfpeak.amp.registration import make_casts
from halfpeak.amp.run import Run
from halfpeak.amp.session import _amp_state, maybe_print, warn_or_err
from halfpeak.checkpoint.scaler_states import from_apex
from halfpeak.core.dtypes import is_low, parse_dtype
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, ParameterError, StateError
from halfpeak.core.levels import resolve
from halfpeak.core.messages import level_table
from halfpeak.core.policy import NormRule
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.core.wrappers import uncompiled, wrapper_of
from halfpeak.parts.build import build
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.validation import prepared_in

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=Optimizer)


class Options(TypedDict, total=False):
    """The arguments of :func:`initialize` after ``opt_level``, for type checkers."""

    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | str | None
    num_losses: int
    verbosity: int | None
    min_loss_scale: float | None
    max_loss_scale: float | None
    patch_torch_functions_type: torch.dtype | None
    norms: NormRule
    patience: int | None


@overload
def initialize(
    models: M,
    optimizers: None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[Options],
) -> M: ...
@overload
def initialize(
    models: Sequence[M],
    optimizers: None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[Options],
) -> list[M]: ...
@overload
def initialize(
    models: M, optimizers: S, enabled: bool = True, opt_level: str = "O1", **options: Unpack[Options]
) -> tuple[M, S]: ...
@overload
def initialize(
    models: M,
    optimizers: Sequence[S],
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[Options],
) -> tuple[M, list[S]]: ...
@overload
def initialize(
    models: Sequence[M],
    optimizers: S,
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[Options],
) -> tuple[list[M], S]: ...
@overload
def initialize(
    models: Sequence[M],
    optimizers: Sequence[S],
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[Options],
) -> tuple[list[M], list[S]]: ...
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    num_losses: int = 1,
    verbosity: int | None = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: Any = None,
    norms: NormRule = "batchnorm",
    patience: int | None = 100,
) -> Any:
    """Prepare models and optimizers in place for an opt level, and return the same objects.

    Call it after the models are on their device and before ``DistributedDataParallel`` wraps them. A call that raises
    changes nothing. Each call creates a run with its own loss scalers and does not change a run that is still training.

    Args:
        models, optimizers: one or a list of each; no optimizers if nothing is trained.
        enabled: False returns the arguments unchanged, and ``scale_loss`` then yields the loss itself.
        opt_level: ``"O0"`` to ``"O5"``. The next five replace a value of the level; None keeps it.
        cast_model_type: dtype of the model; False casts nothing.
        patch_torch_functions: cast the arguments of each torch operation.
        keep_batchnorm_fp32: leave batch norms in float32 (see ``norms``); strings ``"True"`` and ``"False"`` are accepted too.
        master_weights: the optimizer steps float32 copies of low-precision (float16 or bfloat16) parameters.
        loss_scale: a number, a string with a number, or ``"dynamic"``.
        cast_model_outputs: dtype of what ``forward`` returns.
        num_losses: number of loss scalers, chosen by ``loss_id`` in ``scale_loss``.
        verbosity: 0 prints nothing, 1 (and None) the properties and skipped steps, 2 also every cast at O1 and O4.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale. Without a lower one it falls as far as 2**-126.
        patch_torch_functions_type: the low-precision dtype of per-operation casts.
        norms: what ``keep_batchnorm_fp32`` keeps: ``"batchnorm"``, apex's rule, or ``"all"`` normalisation layers, as
            :func:`halfpeak.prepare` does.
        patience: overflows in a row that could not lower the scale before :class:`~halfpeak.LossScaleCollapse`; or None.

    Raises:
        ConfigError: an unknown level, a bad value, an override that contradicts the level, or a model in low precision.
        ConfigTypeError: an argument is not a module, an optimizer, or a list of them.
        ParameterError: a model is inside a parallel wrapper.
        OrderError: a model or an optimizer was initialised before.

    Example:
        >>> import torch
        >>> from halfpeak import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with amp.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    verbosity = 1 if verbosity is None else verbosity
    if isinstance(enabled, str) and enabled != opt_level:  # pyright: ignore[reportUnnecessaryIsInstance]
        warnings.warn(
            f"the third argument of amp.initialize is enabled, as in apex, so enabled={short_repr(enabled)} does not choose "
            f"the level, which is {short_repr(opt_level)}; write amp.initialize(model, optimizer, opt_level=...)",
            stacklevel=2,
        )
    if not enabled:
        _amp_state.opt_properties = Properties()
        _amp_state.verbosity = verbosity
        _amp_state.add_disabled([] if optimizers is None else _listed(optimizers))
        keep_casts_out(model for model in _listed(models) if isinstance(model, nn.Module))
        return models if optimizers is None else (models, optimizers)
    if not isinstance(verbosity, int):
        raise ConfigTypeError(
            f"verbosity={short_repr(verbosity)} must be an integer; write verbosity=0 to print nothing"
        )
    if not torch.backends.cudnn.enabled:
        raise ConfigError("amp requires torch.backends.cudnn.enabled = True; set it before amp.initialize")
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = resolve(opt_level, **overrides, refuse=warn_or_err)
    outputs = None if cast_model_outputs is None else parse_dtype(cast_model_outputs)
    policy = properties.policy(norms=norms, output=outputs)
    scale = properties.bounded_scale(min_loss_scale, max_loss_scale, patience=patience)
    _check_choices(num_losses, norms)
    optimizer_list, model_list = _check_optimizers(optimizers), _check_models(models)
    casts = make_casts(policy.compute, verbosity) if policy.per_op else None
    parts = build(
        policy,
        model_list,
        optimizer_list,
        casts=casts,
        keeps_memory=True,
        looks_at_each_pass=True,
    )
    parts.scalers = [LossScaler(scale, parts.device) for _ in range(num_losses)]
    run = Run(parts, casts=casts, verbosity=verbosity)
    suspend_casts_in_step(run)
    enter_ambient(run)
    _amp_state.opt_properties = Properties(properties)
    _amp_state.verbosity = verbosity
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    _amp_state.add(run, optimizer_list)
    maybe_print(level_table(properties), rank0=True)
    return models if optimizers is None else (models, optimizers)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``, one entry per loss scaler.

    Together with ``model.state_dict()``, which holds the masters' values, and ``optimizer.state_dict()``, this is
    everything that a bitwise resume needs. The scalers of several runs are listed from the last ``initialize`` call to the
    first, so that a state saved beside earlier runs begins with its own. Before the first call there are none. Waits for the
    device.

    Args:
        destination: filled and returned, if given.
    """
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.all_scalers()):
        result[f"loss_scaler{index}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Restore what :func:`state_dict` returned, or what apex saved.

    Entries are loaded in order into the scalers of all runs, or of the last ``initialize`` if the numbers differ. If
    they still differ, a warning is printed and as many as fit are loaded, as in apex. A static scale keeps its value.

    Raises:
        StateError: an unknown key, or an entry with a missing or impossible value. Nothing was loaded.
    """
    require_mapping(state_dict, "the amp state")
    unexpected = [key for key in state_dict if not (isinstance(key, str) and "loss_scaler" in key)]
    if unexpected:
        listed = ", ".join(f'"{key}"' if isinstance(key, str) else short_repr(key) for key in unexpected[:5])
        raise StateError(f"unexpected key(s) in the amp state: {listed}; pass what amp.state_dict() gave")
    entries = list(state_dict.values())
    all_scalers, latest = _amp_state.all_scalers(), _amp_state.loss_scalers
    scalers = all_scalers if len(entries) == len(all_scalers) else latest
    if len(entries) != len(scalers):
        print(f"Warning: the amp state holds {len(entries)} loss scaler(s), this run has {len(scalers)}")
    for index in range(len(scalers), len(entries)):
        print(f"Skipping loss_scaler[{index}]: num_losses={len(scalers)}")
    translated = from_apex({f"loss_scaler{i}": entry for i, entry in enumerate(entries[: len(scalers)])})
    for scaler, numbers in zip(scalers, translated, strict=False):
        scaler.part.load_translated(numbers)
        scaler.clear_overflow_state()


def _check_choices(num_losses: object, norms: object) -> None:
    if type(num_losses) is not int or not 1 <= num_losses <= 2**16:
        raise ConfigError(
            f"num_losses={short_repr(num_losses)} must be an integer from 1 to 65536; write num_losses=1"
        )
    if norms not in get_args(NormRule):
        raise ConfigError(
            f"norms={short_repr(norms)} must be one of {', '.join(map(repr, get_args(NormRule)))}"
        )


def _check_optimizers(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    if isinstance(optimizers, tuple):
        raise ConfigTypeError(
            "optimizers must be a single optimizer or a list of optimizers, not a tuple; write list(optimizers)"
        )
    listed = _listed(optimizers)
    for optimizer in listed:
        if type(optimizer).__name__ == "FP16_Optimizer":  # ours, or either of apex's two
            raise ConfigError(
                f"{type(optimizer).__name__} scales losses by itself; pass the bare optimizer it was made from"
            )
    return listed


def _check_models(models: Any) -> list[nn.Module]:
    if not isinstance(models, (nn.Module, list)):
        raise ConfigTypeError(
            f"models must be a single model or a list of models, not {type(models).__name__}"
        )
    listed: list[Any] = _listed(models)
    for model in listed:
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(f"models must be torch.nn.Module objects, not {type(model).__name__}")
        wrapper = wrapper_of(uncompiled(model))
        if wrapper is not None:
            raise WrappedModelError(
                f"the model is wrapped by {wrapper}; call amp.initialize first and wrap the model it returns"
            )
        prepared = prepared_in(uncompiled(model))
        if prepared is not None:
            raise OrderError(
                f"{prepared} was initialised before; pass all models and optimizers to one call of amp.initialize, or build "
                "a new model"
            )
        low = None if _amp_state.allow_incoming_model_not_fp32 else _first_low_tensor(model)
        if low is not None:
            warn_or_err(
                f"{low} is already in low precision; pass the float32 model, without .half(): amp converts it"
            )
    return listed


class WrappedModelError(ParameterError, ConfigError):
    """A parallel wrapper was passed to ``initialize``. apex raised RuntimeError, which ParameterError is not."""


def _listed(value: Any) -> list[Any]:
    """Return a sequence as a list, and anything else as the only element of a list."""
    return list(value) if isinstance(value, Sequence) else [value]


def _first_low_tensor(model: nn.Module) -> str | None:
    """The name and dtype of the first low-precision parameter or buffer, or None."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_low(tensor):
            return f"{name} ({tensor.dtype})"
    return None
