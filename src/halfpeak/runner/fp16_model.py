"""Making a model compute in a low dtype the way mmcv 1.7.2 did: flags for its decorators, and a low model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfpeak.casting.modules import (
    CastInputs,
    CastOutput,
    convert_module,
    convert_network,
    is_kept_fp32,
    is_prepared,
)
from halfpeak.core.dtypes import LOW, parse_dtype
from halfpeak.core.errors import ConfigError, ConfigTypeError

Mode: TypeAlias = Literal["master", "autocast"]
"""``"master"``: low weights, float32 masters. ``"autocast"``: float32 weights, operations cast one by one."""

_ATTRIBUTE: Final = "fp16_casts"


@dataclass(frozen=True, slots=True)
class Fp16Casts:
    """What ``auto_fp16`` and ``force_fp32`` do in a module with ``fp16_enabled``.

    Attributes:
        dtype: the low dtype.
        autocast: whether operations are cast too, not only arguments. Low weights need no such casts.
    """

    dtype: torch.dtype = torch.float16
    autocast: bool = True


def casts_of(module: object) -> Fp16Casts:
    """What :func:`wrap_fp16_model` has set on a module; mmcv's own where somebody set ``fp16_enabled`` by hand."""
    casts = getattr(module, _ATTRIBUTE, None)
    return casts if isinstance(casts, Fp16Casts) else Fp16Casts()


def wrap_fp16_model(
    model: nn.Module, *, mode: Mode = "autocast", dtype: torch.dtype | str = torch.float16
) -> None:
    """Switch the decorators of a model on, and with ``mode="master"`` cast the model.

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
    low, autocast = parse_low(dtype), parse_mode(mode) == "autocast"
    if not autocast:
        convert_network(model, low, "all")
        patch_norm_fp32(model, low)
    for module in model.modules():
        if hasattr(module, "fp16_enabled"):
            setattr(module, "fp16_enabled", True)  # noqa: B010
            setattr(module, _ATTRIBUTE, Fp16Casts(low, autocast))


def patch_norm_fp32(module: nn.Module, dtype: torch.dtype | str = torch.float16) -> nn.Module:
    """Make every normalisation layer in ``module`` float32, and let it take and return the low dtype; returns ``module``.

    Batch norm needs no casts: its kernels take low inputs with float32 weights. Doing this twice changes nothing.

    >>> layer = patch_norm_fp32(nn.GroupNorm(1, 2).half())
    >>> layer.weight.dtype, layer(torch.ones(1, 2, dtype=torch.float16)).dtype
    (torch.float32, torch.float16)
    """
    low = parse_low(dtype)
    for layer in module.modules():
        if is_kept_fp32(layer, "all"):
            convert_module(layer, torch.float32)
            if not isinstance(layer, _BatchNorm) and not is_prepared(layer):
                layer.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
                layer.register_forward_hook(CastOutput(low), prepend=True)
    return module


def is_decorated(model: nn.Module) -> bool:
    """Whether the model says itself where it computes in a low dtype."""
    return any(hasattr(module, "fp16_enabled") for module in model.modules())


def parse_mode(mode: Any) -> Mode:
    """The mode of that name.

    Raises:
        ConfigError: there is none.
    """
    if mode not in get_args(Mode):
        raise ConfigError(
            f"mode={mode!r} must be 'master' (low weights, float32 masters) or 'autocast' (float32 weights)"
        )
    return mode


def parse_low(dtype: torch.dtype | str) -> torch.dtype:
    """A low dtype, or one of its names.

    Raises:
        ConfigError: anything else.
    """
    low = parse_dtype(dtype)
    if low not in LOW:
        raise ConfigError(f"dtype={dtype!r} is not a low dtype; write 'float16' or 'bfloat16'")
    return low
