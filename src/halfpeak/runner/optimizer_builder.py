"""build_optimizer: builds an optimizer from a model and a flat configuration. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.keywords import unknown_key
from halfpeak.optim import OPTIMIZERS, Registry
from halfpeak.optim.arguments import require_dict
from halfpeak.optim.paramwise import (
    DECAY_RULES,
    LR_RULES,
    PARAMWISE_KEYS,
    ParamGroups,
    Place,
    decay_multiplier,
    is_depthwise,
    is_in,
    lr_multiplier,
)
from halfpeak.optim.unwrap import unwrap

OPTIMIZER_BUILDERS: Final = Registry("optimizer constructor")
"""The classes that ``constructor`` in an optimizer's configuration may name."""

_KEYS: Final = tuple(key for key in PARAMWISE_KEYS if key != "flat_decay_mult")


@OPTIMIZER_BUILDERS.register_module()
class DefaultOptimizerConstructor(ParamGroups):
    """Builds the optimizer over the model's parameters.

    Without ``paramwise_cfg`` all parameters are in one group. With it each parameter has its own group, in the order of
    ``model.named_parameters()``. The keys of ``paramwise_cfg`` are the keys of
    :class:`~halfpeak.optim.DefaultOptimWrapperConstructor` without ``flat_decay_mult``. The groups differ as in mmcv: a
    parameter without gradient gets a plain group; a multiplier that is not given is 1; the bias of a depthwise
    convolution takes ``dwconv_decay_mult``; only the multipliers of ``custom_keys`` count.

    A subclass that overrides ``add_params`` or ``__call__`` may have other keys. The attributes are the other
    constructor's, without ``optim_wrapper_cfg``.

    Raises:
        ConfigTypeError: not a dict, or an unknown key.
        ConfigError: a multiplier is out of range, or multiplies a value that ``optimizer_cfg`` does not set.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> construct = DefaultOptimizerConstructor({"type": "SGD", "lr": 0.5}, {"bias_lr_mult": 2.0})
    >>> [group["lr"] for group in construct(model).param_groups]
    [0.5, 1.0, 0.5, 0.5]
    """

    def __init__(
        self, optimizer_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        self.optimizer_cfg = require_dict("optimizer_cfg", optimizer_cfg, "dict(type='SGD', lr=0.1)")
        self._read(paramwise_cfg)
        if "flat_decay_mult" in self.paramwise_cfg and not self._is_customised():
            raise ConfigTypeError(unknown_key("paramwise_cfg", "flat_decay_mult", _KEYS))

    def __call__(self, model: nn.Module) -> Optimizer:
        """Build the optimizer over the parameters of the model inside any parallel wrapper.

        Raises:
            RegistryError: the ``type`` is not registered.
            ConfigTypeError: the optimizer does not take an argument.
        """
        inner = unwrap(model)
        params: list[Any] = []
        if self.paramwise_cfg:
            self.add_params(params, inner)
        else:
            params.extend(inner.parameters())
        return OPTIMIZERS.build({**self.optimizer_cfg, "params": params})

    def _add(self, params: list[dict[str, Any]], parameter: nn.Parameter, place: Place) -> None:
        if not parameter.requires_grad:
            params.append({"params": [parameter]})
        elif self.paramwise_cfg.get("bypass_duplicate") and is_in(parameter, params):
            warnings.warn(
                f"{place.prefix} is duplicate. It is skipped since bypass_duplicate=True", stacklevel=3
            )
        else:
            params.append({"params": [parameter], **self._options(parameter, place)[1]})

    def _multipliers(self, parameter: nn.Parameter, place: Place) -> tuple[float | None, float | None]:
        cfg = {**dict.fromkeys((*LR_RULES, *DECAY_RULES), 1.0), **self.paramwise_cfg, "flat_decay_mult": None}
        if is_depthwise(place.module):
            cfg["bias_decay_mult"] = None
        return lr_multiplier(cfg, place), decay_multiplier(cfg, place, parameter.ndim)


def build_optimizer_constructor(cfg: Mapping[str, Any]) -> Any:
    """Build the optimizer constructor whose registered name is the ``type`` of ``cfg``."""
    return OPTIMIZER_BUILDERS.build(cfg)


def build_optimizer(model: nn.Module, cfg: Mapping[str, Any]) -> Any:
    """Build the optimizer that a configuration describes, over the parameters of ``model``.

    Args:
        cfg: ``type`` and arguments of the optimizer. ``paramwise_cfg`` sets options per parameter
            (:class:`DefaultOptimizerConstructor`); ``constructor`` names the class that reads ``cfg``. Not modified.

    Raises:
        RegistryError: a name is not registered.
        ConfigTypeError: not a dict, or an unknown key.
        ConfigError: a value is out of range.

    >>> build_optimizer(nn.Linear(2, 1), {"type": "SGD", "lr": 0.1}).defaults["lr"]
    0.1
    """
    optimizer_cfg = dict(require_dict("cfg", cfg, "dict(type='SGD', lr=0.1)"))
    constructor = optimizer_cfg.pop("constructor", "DefaultOptimizerConstructor")
    paramwise_cfg = optimizer_cfg.pop("paramwise_cfg", None)
    return build_optimizer_constructor(
        {"type": constructor, "optimizer_cfg": optimizer_cfg, "paramwise_cfg": paramwise_cfg}
    )(model)
