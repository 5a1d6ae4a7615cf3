"""Half precision as in mmcv 1.7.2: ``fp16_enabled`` flags, low-precision weights and their masters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.modules import (
    cast_around,
    convert_module,
    convert_network,
    is_kept_fp32,
    is_prepared,
    needs_fp32_inputs,
)
from halfpeak.core.dtypes import LOW, parse_dtype
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.levels import resolve
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.policy import Policy
from halfpeak.core.short_repr import short_repr
from halfpeak.core.wrappers import wrapper_of
from halfpeak.ops.shards import has_shards
from halfpeak.optim.unwrap import check_can_convert, reconnect, unwrap
from halfpeak.parts.build import build
from halfpeak.parts.model_hooks import hook_forward
from halfpeak.parts.parts import Parts

Mode: TypeAlias = Literal["master", "autocast"]
"""``"master"``: low weights and float32 masters. ``"autocast"``: float32 weights, casts per operation."""

_ATTRIBUTE: Final = "fp16_casts"


@dataclass(frozen=True, slots=True)
class Fp16Casts:
    """The casts of ``auto_fp16`` and ``force_fp32`` in a module with ``fp16_enabled``.

    Attributes:
        dtype: the low dtype.
        autocast: whether autocast runs in addition to casts of arguments. Low weights do not need it.
    """

    dtype: torch.dtype = torch.float16
    autocast: bool = True


def casts_of(module: object) -> Fp16Casts:
    """The casts that :func:`wrap_fp16_model` has set on a module, or mmcv's if a script set ``fp16_enabled`` itself."""
    casts = getattr(module, _ATTRIBUTE, None)
    return casts if isinstance(casts, Fp16Casts) else Fp16Casts()


def wrap_fp16_model(
    model: nn.Module, *, mode: Mode = "autocast", dtype: torch.dtype | str = torch.float16
) -> None:
    """Switch on the decorators of a model and, with ``mode="master"``, convert its weights.

    ::

        autocast   module.fp16_enabled = True on every module that has the attribute; weights stay float32
        master     the same; weights become low, normalisation layers stay float32

    Raises:
        ConfigTypeError: not a module.
        ConfigError: an unknown mode, or a dtype that is not low.

    >>> class Head(nn.Linear):
    ...     fp16_enabled = False
    >>> model = nn.Sequential(Head(2, 2), nn.LayerNorm(2))
    >>> wrap_fp16_model(model, mode="master")
    >>> model[0].fp16_enabled, [p.dtype for p in model.parameters()][1:3]
    (True, [torch.float16, torch.float32])
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"wrap_fp16_model takes a module, not {type(model).__name__}")
    casts = Fp16Casts(parse_low(dtype), parse_mode(mode) == "autocast")
    if not casts.autocast:
        convert_network(model, casts.dtype, "all")
        patch_norm_fp32(model, casts.dtype)
    _switch_on(model, casts)


def _switch_on(model: nn.Module, casts: Fp16Casts) -> None:
    """Switch on the decorators of a model."""
    for module in model.modules():
        if hasattr(module, "fp16_enabled"):
            setattr(module, "fp16_enabled", True)  # noqa: B010
            setattr(module, _ATTRIBUTE, casts)


def patch_norm_fp32(module: nn.Module, dtype: torch.dtype | str = torch.float16) -> nn.Module:
    """Convert the normalisation layers in ``module`` to float32, with low inputs and outputs; return ``module``.

    Batch norm needs no casts. A second call changes nothing.

    >>> layer = patch_norm_fp32(nn.GroupNorm(1, 2).half())
    >>> layer.weight.dtype, layer(torch.ones(1, 2, dtype=torch.float16)).dtype
    (torch.float32, torch.float16)
    """
    low = parse_low(dtype)
    for layer in module.modules():
        if is_kept_fp32(layer, "all"):
            convert_module(layer, torch.float32)
            if needs_fp32_inputs(layer, "all") and not is_prepared(layer):
                cast_around(layer, torch.float32, low)
    return module


def is_decorated(model: nn.Module) -> bool:
    """Whether a module of the model has ``fp16_enabled``, as models with ``auto_fp16`` methods do."""
    return any(hasattr(module, "fp16_enabled") for module in model.modules())


def parse_mode(mode: Any) -> Mode:
    """Return ``mode``; ConfigError unless it is a known mode."""
    if mode not in get_args(Mode):
        raise ConfigError(
            f"mode={short_repr(mode)} must be 'master' (low weights, float32 masters) or 'autocast' (float32 weights)"
        )
    return mode


def parse_low(dtype: torch.dtype | str) -> torch.dtype:
    """The low dtype that ``dtype`` is or names; ConfigError if it is none."""
    low = parse_dtype(dtype)
    if low not in LOW:
        raise ConfigError(f"dtype={short_repr(dtype)} is not a low dtype; write 'float16' or 'bfloat16'")
    return low


def prepare_fp16(model: nn.Module, optimizer: Optimizer, *, mode: Mode, dtype: torch.dtype) -> Parts:
    """Prepare model and optimizer. A call that raises leaves them unchanged.

    Args:
        model: may be wrapped in ``DistributedDataParallel``.
        optimizer: with ``mode="master"`` its groups hold float32 masters afterwards.
        mode: as in :func:`wrap_fp16_model`.
        dtype: the low dtype.

    Raises:
        ParameterError: a model or optimizer that cannot be prepared.
        OrderError: the model was prepared before.
    """
    inner, casts_itself = unwrap(model), is_decorated(unwrap(model))
    if mode == "autocast":
        parts = build(Policy(), [inner], [optimizer])
    else:
        check_can_convert(model)
        policy = resolve("O2" if dtype is torch.float16 else "O5").policy(norms="all")
        if casts_itself:
            # The model's decorators cast, so nothing else must cast at the model's boundary.
            policy = replace(policy, cast_forward_inputs=False, output=None)
        exact = [(parameter, parameter.data) for parameter in inner.parameters()]
        parts = build(policy, [inner], [optimizer])
        with torch.no_grad():
            for parameter, value in exact:
                if parameter.dtype is not value.dtype:
                    parameter.copy_(parts.pairs.set_value(parameter, value))
        parts.agree()
        if not casts_itself:
            parts.handles += suspend_autocast(inner, parts.device.type)
        reconnect(model)
    _switch_on(inner, Fp16Casts(dtype, autocast=mode == "autocast"))
    parts.handles += [hook_forward(inner, parts.before_forward)]
    return parts


def suspend_autocast(model: nn.Module, device_type: str) -> list[RemovableHandle]:
    """Switch autocast off inside the ``forward`` of a model with low weights and casts at its boundary.

    >>> model = nn.Linear(2, 1)
    >>> handles = suspend_autocast(model, "cpu")
    >>> with torch.autocast("cpu"):
    ...     inside, outside = model(torch.ones(1, 2)).dtype, torch.relu(model.weight @ torch.ones(2)).dtype
    >>> inside, outside
    (torch.float32, torch.bfloat16)
    """
    pause = _Pause(device_type)
    return [
        model.register_forward_pre_hook(pause.begin, prepend=True),
        model.register_forward_hook(pause.end, always_call=True),
    ]


class _Pause:
    """Switches autocast off and back on; nests. Sets torch's flag: torch.compile cannot trace the context manager."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._before: list[bool] = []

    def begin(self, module: nn.Module, args: object) -> None:
        self._before.append(torch.is_autocast_enabled(self._device_type))
        torch.set_autocast_enabled(self._device_type, False)

    def end(self, module: nn.Module, args: object, output: object) -> None:
        if self._before:  # empty if an earlier hook raised before begin
            torch.set_autocast_enabled(self._device_type, self._before.pop())


def reduces_itself(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether DDP or FSDP around the model, or sharded parameters, already reduce gradients over the ranks."""
    names = ("DistributedDataParallel", "FullyShardedDataParallel")
    while True:
        if (wrapper_of(model) or "").endswith(names):
            return True
        inner = next(iter(model.children()), model) if wrapper_of(model) else model
        if inner is model:
            return has_shards(params_of(optimizer))
        model = inner
