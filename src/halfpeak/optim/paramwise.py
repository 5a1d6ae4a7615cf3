"""``paramwise_cfg``: the rules for the learning rate and weight decay of a parameter, and the groups that follow from them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import unknown_key
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_number
from halfpeak.optim.arguments import require_dict, require_flag

LR_RULES: Final = ("bias_lr_mult", "dcn_offset_lr_mult")
DECAY_RULES: Final = ("norm_decay_mult", "bias_decay_mult", "dwconv_decay_mult", "flat_decay_mult")
PARAMWISE_KEYS: Final = (*LR_RULES, *DECAY_RULES, "bypass_duplicate", "custom_keys")
CUSTOM_KEYS: Final = ("lr_mult", "decay_mult")

_NORMS: Final = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
_DCN: Final = frozenset({"DeformConv2d", "ModulatedDeformConv2d"})


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter's name, its module, the module's path, and whether it is inside a deformable convolution."""

    name: str
    module: nn.Module
    prefix: str
    in_dcn: bool

    @property
    def full_name(self) -> str:
        """The name as in ``model.named_parameters()``."""
        return f"{self.prefix}.{self.name}" if self.prefix else self.name


class ParamGroups(ABC):
    """The base class of both constructors: reads a ``paramwise_cfg`` and makes one group per parameter, in module order."""

    optimizer_cfg: Mapping[str, Any]

    def _read(self, paramwise_cfg: Mapping[str, Any] | None) -> None:
        self.paramwise_cfg: Mapping[str, Any] = {} if paramwise_cfg is None else paramwise_cfg
        self.base_lr: Any = self.optimizer_cfg.get("lr")
        self.base_wd: Any = self.optimizer_cfg.get("weight_decay")
        check_paramwise(self.paramwise_cfg, self.optimizer_cfg, strict=not self._is_customised())

    def add_params(
        self,
        params: list[dict[str, Any]],
        module: nn.Module,
        prefix: str = "",
        is_dcn_module: bool | None = None,
    ) -> None:
        """Append the groups of a module and its submodules to ``params``.

        Args:
            params: extended in place.
            prefix: the path of ``module`` in the model.
            is_dcn_module: whether ``module`` is part of a deformable convolution.
        """
        for name, parameter in module.named_parameters(recurse=False):
            self._add(params, parameter, Place(name, module, prefix, bool(is_dcn_module)))
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            self.add_params(params, child, prefix=path, is_dcn_module=is_dcn(module))

    @abstractmethod
    def _add(self, params: list[dict[str, Any]], parameter: nn.Parameter, place: Place) -> None:
        """Append the group of a parameter, unless the parameter gets none."""

    @abstractmethod
    def _multipliers(self, parameter: nn.Parameter, place: Place) -> tuple[float | None, float | None]:
        """Return the multipliers of lr and weight decay without an entry of ``custom_keys``; None without a rule."""

    def _options(self, parameter: nn.Parameter, place: Place) -> tuple[str | None, dict[str, Any]]:
        """Return the key of ``custom_keys`` that decides, or None, and the lr and weight decay that rules set."""
        custom: Mapping[str, Mapping[str, Any]] = self.paramwise_cfg.get("custom_keys", {})
        key = custom_key(custom, place)
        if key is not None:
            lr, decay = custom[key].get("lr_mult", 1.0), custom[key].get("decay_mult", 1.0)
        else:
            lr, decay = self._multipliers(parameter, place)
        options: dict[str, Any] = {}
        if lr is not None and self.base_lr is not None:
            options["lr"] = self.base_lr * lr
        if decay is not None and self.base_wd is not None:
            options["weight_decay"] = self.base_wd * decay
        return key, options

    def _is_customised(self) -> bool:
        """Whether user code overrides how groups are made, and may thus read further keys."""
        methods: Sequence[Any] = (type(self).add_params, type(self).__call__)
        return not all(method.__module__.startswith("halfpeak.") for method in methods)


def is_in(parameter: Tensor, params: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a group holds a parameter."""
    return any(parameter is other for group in params for other in members_of(group))


def members_of(group: Mapping[str, Any]) -> Iterable[Tensor]:
    """The parameters of a group."""
    members = group["params"]
    return [members] if isinstance(members, Tensor) else members


def custom_key(keys: Iterable[str], place: Place) -> str | None:
    """Return the longest key that is part of ``prefix.name``, then the first in the alphabet; None if there is none.

    The model's own parameters have an empty prefix, so ``".weight"`` finds them too.

    >>> custom_key(["weight", "backbone"], Place("weight", nn.Identity(), "backbone.0", False))
    'backbone'
    """
    text = f"{place.prefix}.{place.name}"
    return min((key for key in keys if key in text), key=lambda key: (-len(key), key), default=None)


def lr_multiplier(cfg: Mapping[str, Any], place: Place) -> float | None:
    """Return ``dcn_offset_lr_mult`` for a deformable convolution's offset, ``bias_lr_mult`` for a bias, else None.

    The bias of a norm, and any bias inside a deformable convolution, does not count as a bias.
    """
    offset = place.in_dcn and "conv_offset" in place.prefix and isinstance(place.module, nn.Conv2d)
    if offset and cfg.get("dcn_offset_lr_mult") is not None:
        return cfg["dcn_offset_lr_mult"]
    bias = place.name == "bias" and not place.in_dcn and not is_norm(place.module)
    return cfg.get("bias_lr_mult") if bias else None


def decay_multiplier(cfg: Mapping[str, Any], place: Place, ndim: int) -> float | None:
    """Return the first given multiplier that applies: norm, bias, depthwise convolution, flat (a vector); or None."""
    applies = {
        "norm_decay_mult": is_norm(place.module),
        "bias_decay_mult": place.name == "bias" and not place.in_dcn,
        "dwconv_decay_mult": is_depthwise(place.module),
        "flat_decay_mult": ndim == 1 and not place.in_dcn,
    }
    return next((cfg[key] for key in DECAY_RULES if applies[key] and cfg.get(key) is not None), None)


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a batch, instance, group or layer norm."""
    return isinstance(module, _NORMS)


def is_depthwise(module: nn.Module) -> bool:
    """Whether ``module`` is a ``Conv2d`` with one group per input channel; with one channel it always is."""
    return isinstance(module, nn.Conv2d) and module.in_channels == module.groups


def is_dcn(module: nn.Module) -> bool:
    """Whether ``module`` is a deformable convolution, by its class's name: the classes are in other packages."""
    return any(cls.__name__ in _DCN for cls in type(module).__mro__)


def check_paramwise(cfg: object, optimizer_cfg: Mapping[str, Any], *, strict: bool) -> None:
    """Check a ``paramwise_cfg``, whose multipliers apply to ``lr`` and ``weight_decay`` of ``optimizer_cfg``.

    Args:
        strict: refuse unknown keys.

    Raises:
        ConfigTypeError: not a dict, an entry of the wrong type, or an unknown key.
        ConfigError: a multiplier is negative or not finite, or the optimizer's configuration lacks what it multiplies.
    """
    if not isinstance(cfg, Mapping):
        raise ConfigTypeError(f"paramwise_cfg must be None or a dict, not {type(cfg).__name__}")
    for key in cfg:
        if strict and key not in PARAMWISE_KEYS:
            raise ConfigTypeError(unknown_key("paramwise_cfg", key, PARAMWISE_KEYS))
    require_flag("bypass_duplicate", cfg.get("bypass_duplicate", False))
    for key in (*LR_RULES, *DECAY_RULES):
        if cfg.get(key) is not None:
            _check_multiplier(key, cfg[key], "lr" if key in LR_RULES else "weight_decay", optimizer_cfg)
    for key, entry in _custom(cfg).items():
        for one, of in (("lr_mult", "lr"), ("decay_mult", "weight_decay")):
            if one in entry:
                name = f"custom_keys[{short_repr(key)}][{short_repr(one)}]"
                _check_multiplier(name, entry[one], of, optimizer_cfg)


def check_custom_options(cfg: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise ConfigTypeError if an entry of ``custom_keys`` has a key besides the multipliers and the optimizer's ``options``.

    The optimizer would never read such a key from the group.
    """
    allowed = (*CUSTOM_KEYS, *options)
    for key, entry in _custom(cfg).items():
        for option in entry:
            if option not in allowed:
                raise ConfigTypeError(unknown_key(f"custom_keys[{short_repr(key)}]", option, allowed))


def _custom(cfg: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    custom = cfg.get("custom_keys", {})
    require_dict("custom_keys", custom, "{'backbone': dict(...)}")
    for key, entry in custom.items():
        if not isinstance(key, str) or not isinstance(entry, Mapping):
            raise ConfigTypeError(
                f"custom_keys[{short_repr(key)}]={short_repr(entry)} must be a part of a parameter's name and a dict, such as "
                "{'backbone': dict(lr_mult=0.1)}"
            )
    return custom


def _check_multiplier(name: str, value: object, of: str, optimizer_cfg: Mapping[str, Any]) -> None:
    base = optimizer_cfg.get(of)
    if not is_number(value):
        raise ConfigTypeError(f"{name}={short_repr(value)} must be a number, such as 0.1")
    if not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{name}={short_repr(value)} must be finite and not negative")
    if base is None:
        raise ConfigError(
            f"{name}={short_repr(value)} multiplies {of}, which the optimizer's dict does not set; write {of}="
        )
    if not is_number(base) and not isinstance(base, Tensor):
        raise ConfigTypeError(f"{of}={short_repr(base)} must be a number, because {name} multiplies it")
