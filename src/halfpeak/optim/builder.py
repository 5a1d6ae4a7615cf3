"""build_optim_wrapper: builds a wrapper from a configuration. Compatible with mmengine 0.10.7."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.optim.arguments import require_dict
from halfpeak.optim.constructor import DefaultOptimWrapperConstructor
from halfpeak.optim.members import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from halfpeak.optim.wrapper import OptimWrapper


def build_optim_wrapper(model: nn.Module, cfg: Mapping[str, Any]) -> OptimWrapper:
    """Build the optimizer and the wrapper of a configuration over the parameters of ``model``.

    Args:
        cfg: not changed. ``type`` names the wrapper (default ``"OptimWrapper"``). ``optimizer`` is the optimizer's dict
            with a ``type`` of its own, or a built optimizer. ``paramwise_cfg`` sets options per parameter
            (:class:`DefaultOptimWrapperConstructor`). ``constructor`` names the constructor. Every other key is an
            argument of the wrapper.

    Returns:
        The constructor's result: a wrapper, unless user code registered a constructor that returns something else.

    Raises:
        RegistryError: a name that is not registered.
        ConfigTypeError: not a dict, or an unknown key.
        ConfigError: a value out of range, or no ``optimizer``.

    >>> cfg = {"type": "AmpOptimWrapper", "dtype": "bfloat16", "optimizer": {"type": "SGD", "lr": 0.1}}
    >>> build_optim_wrapper(nn.Linear(2, 1), cfg).get_lr()
    {'lr': [0.1]}
    """
    require_dict("cfg", cfg, "dict(type='OptimWrapper', optimizer=dict(...))")
    wrapper_cfg = dict(_copied(cfg, {}))
    paramwise_cfg = wrapper_cfg.pop("paramwise_cfg", None)
    constructor = wrapper_cfg.pop("constructor", None)
    if constructor is None and isinstance(wrapper_cfg.get("optimizer"), Optimizer):
        if paramwise_cfg:
            raise ConfigTypeError(
                "paramwise_cfg sets the parameter groups when an optimizer is built, but 'optimizer' in cfg is a built "
                f"{type(wrapper_cfg['optimizer']).__name__}; write optimizer=dict(type=..., ...)"
            )
        return OPTIM_WRAPPERS.build(wrapper_cfg, default_args={"type": "OptimWrapper"})
    construct = OPTIM_WRAPPER_CONSTRUCTORS.build(
        {
            "type": DefaultOptimWrapperConstructor if constructor is None else constructor,
            "optim_wrapper_cfg": wrapper_cfg,
            "paramwise_cfg": paramwise_cfg,
        }
    )
    return construct(model)


def _copied(value: Any, done: dict[int, Any]) -> Any:
    """Copy nested dicts, lists and tuples, each once. Leaves are shared: an optimizer must stay the same object.

    Raises:
        ConfigError: a container is nested in itself, or a thousand deep.
    """
    if id(value) in done or not (isinstance(value, dict) or type(value) in (list, tuple)):
        return done.get(id(value), value)
    try:
        if isinstance(value, dict):
            rebuilt: Any = copy.copy(value)  # keeps a type with attribute access
            for key, item in value.items():
                rebuilt[key] = _copied(item, done)
        else:
            rebuilt = type(value)(_copied(item, done) for item in value)
    except RecursionError:
        raise ConfigError("cfg contains itself, or is nested about a thousand levels deep") from None
    done[id(value)] = rebuilt
    return rebuilt
