"""Checks of hyper-parameters, parameters, gradients and states. Each error says what to write instead."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import required

from halfpeak.core.errors import ConfigError, ConfigTypeError, ParameterError
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.rules.base import Rule
from halfpeak.ops.shards import is_shard

AT_LEAST_ZERO: Final = (
    "lr",
    "eps",
    "weight_decay",
    "momentum",
    "lr_decay",
    "initial_accumulator_value",
    "max_grad_norm",
)


def check_group(group: Mapping[str, Any]) -> None:
    """Check the hyper-parameters of one group.

    >>> check_group({"lr": -1.0})
    Traceback (most recent call last):
        ...
    halfpeak.core.errors.ConfigError: lr=-1.0 must be a number of at least 0

    Raises:
        ConfigError: a value is out of its range, or missing.
        ConfigTypeError: a value is not a number.
    """
    for name, value in group.items():
        if value is required:
            raise ConfigError(
                f"a parameter group has no {name}, and the optimizer has no default for it; pass {name}= to the optimizer "
                "or in the group"
            )
    for name in AT_LEAST_ZERO:
        if name in group and not _number(name, group[name]) >= 0:
            raise ConfigError(f"{name}={short_repr(group[name])} must be a number of at least 0")
    if "betas" in group:
        _check_betas(group["betas"])
    if "dampening" in group:
        _number("dampening", group["dampening"])
    if group.get("nesterov") and not (group["momentum"] > 0 and group["dampening"] == 0):
        raise ConfigError(
            f"nesterov=True needs momentum above 0 and dampening=0, not momentum={short_repr(group['momentum'])} and "
            f"dampening={short_repr(group['dampening'])}"
        )
    if group.get("norm_type", 2) not in (2, math.inf):
        raise ConfigError(f"norm_type={short_repr(group['norm_type'])} must be 2 or float('inf')")


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ConfigTypeError(f"betas={short_repr(betas)} must be two numbers of at least 0 and below 1")
    for beta in betas:  # pyright: ignore[reportUnknownVariableType]
        if not 0 <= _number("betas", beta) < 1:
            raise ConfigError(f"betas={short_repr(betas)} must be two numbers of at least 0 and below 1")


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(f"{name} is a tensor of shape {tuple(value.shape)}; it must have one element")
    if not isinstance(value, (int, float, Tensor)):
        raise ConfigTypeError(f"{name}={short_repr(value)} must be a number")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ConfigError(f"{name}={short_repr(value)} is too large for a float64; write a smaller number")
    return float(value)


def check_parameter(target: Tensor, rule: Rule) -> None:
    """Raise ParameterError for a parameter that no kernel can update by ``rule``."""
    sharded = is_shard(target)
    if sharded and rule.layerwise:
        raise ParameterError(
            "this optimizer needs the norm of each whole parameter, but this parameter is sharded (a DTensor): each rank "
            "holds only a part of it; use FusedSGD, FusedAdagrad, FusedAdamW or FusedAdam"
        )
    if sharded and any(part.block_size > 1 for part in rule.storage) and _splits_rows(target):
        raise ParameterError(
            "moments='int8' stores one number for each block of a row, and this parameter is sharded across its rows "
            f"({short_repr(target.placements)}); give it moments=torch.bfloat16"  # type: ignore[attr-defined]
        )
    if (
        not target.is_floating_point()
        or target.layout is not torch.strided
        or (type(target.data) is not Tensor and not sharded)
    ):
        kind = (
            type(target.data).__name__
            if type(target.data) is not Tensor
            else f"{target.layout} {target.dtype}"
        )
        raise ParameterError(
            f"a fused optimizer needs dense real floating-point parameters, and this one is a {kind}; use torch.optim for it"
        )


def _splits_rows(target: Any) -> bool:
    return any(getattr(placement, "dim", 0) != 0 for placement in target.placements)


def check_gradients(grads: Sequence[Tensor | None]) -> None:
    """Raise ParameterError for a sparse gradient. One check per layout is enough: a layer makes all sparse or none."""
    for grad in grads:
        if grad is not None and grad.layout is not torch.strided:
            raise ParameterError(
                f"a fused optimizer needs dense gradients, and this one is {grad.layout}; build the layer with sparse=False, "
                "or give its parameters to torch.optim.SparseAdam or torch.optim.SGD"
            )


def check_state(name: str, value: Tensor, place: Tensor) -> None:
    """Raise ParameterError for a state tensor of another shape than its place in the buffer."""
    if value.shape != place.shape:
        raise ParameterError(
            f"the state {name!r} of a parameter has shape {tuple(value.shape)} instead of {tuple(place.shape)}; "
            "load the state of this model's optimizer"
        )
