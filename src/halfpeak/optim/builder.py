"""Building a wrapper from a configuration: build_optim_wrapper and DefaultOptimWrapperConstructor.

Compatible with mmengine 0.10.7.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import Factory, keywords_of, name_of
from halfpeak.optim.arguments import require_dict
from halfpeak.optim.members import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from halfpeak.optim.metrics_sink import current_logger
from halfpeak.optim.paramwise import (
    ParamGroups,
    Place,
    check_custom_options,
    decay_multiplier,
    is_in,
    lr_multiplier,
    members_of,
)
from halfpeak.optim.registry import Registry
from halfpeak.optim.unwrap import unwrap
from halfpeak.optim.wrapper import OptimWrapper


def build_optim_wrapper(model: nn.Module, cfg: Mapping[str, Any]) -> OptimWrapper:
    """Build the optimizer and the wrapper of a configuration over the parameters of ``model``.

    Args:
        cfg: not changed. ``type`` names the wrapper (default ``"OptimWrapper"``), ``constructor`` the constructor.
            ``optimizer`` is the optimizer's dict with a ``type`` of its own, or a built optimizer. ``paramwise_cfg`` is for
            :class:`DefaultOptimWrapperConstructor`. Every other key is an argument of the wrapper.

    Returns:
        The constructor's result, usually a wrapper.

    Raises:
        RegistryError: a name that is not registered.
        ConfigTypeError: not a dict, or an unknown key.
        ConfigError: a value out of range, or no ``optimizer``.

    >>> cfg = {"type": "AmpOptimWrapper", "dtype": "bfloat16", "optimizer": {"type": "SGD", "lr": 0.1}}
    >>> build_optim_wrapper(nn.Linear(2, 1), cfg).get_lr()
    {'lr': [0.1]}
    """
    require_dict("cfg", cfg, "dict(type='OptimWrapper', optimizer=dict(...))")
    built = cfg.get("optimizer")  # may be an optimizer, which must stay the same object
    try:
        wrapper_cfg = copy.deepcopy(dict(cfg), {id(built): built} if isinstance(built, Optimizer) else {})
    except RecursionError as error:
        raise ConfigError("cfg is nested too deeply to be copied; write a flat dict") from error
    paramwise_cfg = wrapper_cfg.pop("paramwise_cfg", None)
    constructor = wrapper_cfg.pop("constructor", None)
    if constructor is None and isinstance(built, Optimizer):
        if paramwise_cfg:
            raise ConfigTypeError(
                "paramwise_cfg sets the parameter groups when an optimizer is built, but 'optimizer' in cfg is a built "
                f"{type(built).__name__}; write optimizer=dict(type=..., ...)"
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


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor(ParamGroups):
    """Build the optimizer over the model's parameters, then the wrapper around it.

    Without ``paramwise_cfg`` there is one group with every parameter. With it every parameter that requires a gradient
    has a group of its own, in the order of ``model.named_parameters()``, and these keys change it::

        custom_keys          {part of a name: options}: the longest part found in 'prefix.name' decides alone.
                             lr_mult and decay_mult multiply; every option also goes into the group as it is
        bias_lr_mult         a bias that is neither of a norm nor inside a deformable convolution
        dcn_offset_lr_mult   the offset convolution of a deformable one
        norm_decay_mult      BatchNorm, InstanceNorm, GroupNorm, LayerNorm   ┐
        bias_decay_mult      a bias outside deformable convolutions          │ the first that
        dwconv_decay_mult    a depthwise Conv2d                              │ is given
        flat_decay_mult      a vector outside deformable convolutions        ┘
        bypass_duplicate     a shared parameter keeps its first group, instead of an error

    A subclass may override ``add_params`` or ``__call__``, and may then read further keys. The attributes are mmengine's:
    ``optim_wrapper_cfg``, ``optimizer_cfg``, ``paramwise_cfg``, ``base_lr``, ``base_wd``.

    Raises:
        ConfigTypeError: not a dict, or an unknown key.
        ConfigError: no ``optimizer``; a multiplier is out of range, or multiplies a value that ``optimizer`` lacks.
    """

    # The subclass in halfpeak.shim uses mmengine's own registries.
    _optimizers: ClassVar[Registry] = OPTIMIZERS
    _wrappers: ClassVar[Registry] = OPTIM_WRAPPERS

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        require_dict("optim_wrapper_cfg", optim_wrapper_cfg, "dict(optimizer=dict(type='SGD', lr=0.1))")
        if "optimizer" not in optim_wrapper_cfg:
            raise ConfigError(
                "`optim_wrapper_cfg` must contain 'optimizer'; write dict(optimizer=dict(type='SGD', lr=0.1))"
            )
        self.optim_wrapper_cfg: dict[str, Any] = dict(optim_wrapper_cfg)
        self.optimizer_cfg: Mapping[str, Any] = self.optim_wrapper_cfg.pop("optimizer")
        require_dict("optimizer", self.optimizer_cfg, "dict(type='SGD', lr=0.1)")
        self._read(paramwise_cfg)

    def __call__(self, model: nn.Module) -> Any:
        """Build the optimizer and its wrapper. ``model`` may be a parallel wrapper around the model.

        Raises:
            RegistryError: a ``type`` is not registered.
            ConfigTypeError: the optimizer or the wrapper does not take an argument.
            ConfigError: no parameter requires a gradient, or a parameter is in several groups.
        """
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        wrapper_cfg = {"type": "OptimWrapper", **self.optim_wrapper_cfg}
        self._wrappers.resolve(wrapper_cfg)
        factory = self._optimizers.resolve(self.optimizer_cfg)
        argument = self._check_options(factory)
        groups = self._groups(unwrap(model))
        optimizer = self._optimizers.build({**self.optimizer_cfg, argument: groups})
        return self._wrappers.build(wrapper_cfg, default_args={"optimizer": optimizer})

    def _add(self, params: list[dict[str, Any]], parameter: nn.Parameter, place: Place) -> None:
        if self.paramwise_cfg.get("bypass_duplicate") and is_in(parameter, params):
            current_logger().warning(
                "%s is duplicate. It is skipped since bypass_duplicate=True", place.full_name
            )
        elif not parameter.requires_grad:
            current_logger().warning("%s is skipped since its requires_grad=False", place.full_name)
        else:
            key, options = self._options(parameter, place)
            options |= {} if key is None else self.paramwise_cfg["custom_keys"][key]
            params.append({"params": [parameter], **options})
            for name, value in options.items():
                current_logger().info("paramwise_options -- %s:%s=%s", place.full_name, name, value)

    def _multipliers(self, parameter: nn.Parameter, place: Place) -> tuple[float | None, float | None]:
        return (
            lr_multiplier(self.paramwise_cfg, place),
            decay_multiplier(self.paramwise_cfg, place, parameter.ndim),
        )

    def _groups(self, model: nn.Module) -> list[Any]:
        if not self.paramwise_cfg:
            return list(model.parameters())
        groups: list[dict[str, Any]] = []
        self.add_params(groups, model)
        if not groups:
            raise ConfigError(
                f"no parameter of {type(model).__name__} requires a gradient; there is nothing to train"
            )
        _check_duplicates(groups, model)
        return groups

    def _check_options(self, factory: Factory) -> str:
        """Check the options, and return the name of the optimizer's first argument, which takes the parameters."""
        takes = keywords_of(factory)
        if not takes.names:
            raise ConfigTypeError(
                f"{name_of(factory)} has no named argument, so the argument for the parameters is unknown; wrap it in a "
                "function whose first argument takes them"
            )
        argument, *options = takes.names
        if argument in self.optimizer_cfg:
            raise ConfigError(
                f"{argument!r} in the optimizer's dict would be replaced by the model's parameters; remove it"
            )
        if not takes.is_open and not self._is_customised():
            check_custom_options(self.paramwise_cfg, options)
        return argument


def _check_duplicates(groups: list[dict[str, Any]], model: nn.Module) -> None:
    seen: set[int] = set()
    for group in groups:
        own = {id(parameter) for parameter in members_of(group)}
        if seen & own:
            shared = [
                name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in seen & own
            ]
            raise ConfigError(
                f"some parameters appear in more than one parameter group: the names {', '.join(shared)} share a parameter; "
                "write paramwise_cfg=dict(bypass_duplicate=True) to keep its first group"
            )
        seen |= own
