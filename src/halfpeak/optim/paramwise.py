"""The rules of ``paramwise_cfg``: pure functions for the learning rate and weight decay of a parameter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_dict, require_flag
from halfpeak.optim.registry import unknown_key

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


def check_paramwise(cfg: object, base_lr: object, base_wd: object, *, strict: bool) -> None:
    """Check a ``paramwise_cfg``.

    Args:
        base_lr: ``lr`` of the optimizer's configuration, or None.
        base_wd: ``weight_decay`` of the optimizer's configuration, or None.
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
            _check_multiplier(
                key, cfg[key], *((base_lr, "lr") if key in LR_RULES else (base_wd, "weight_decay"))
            )
    for key, entry in _custom(cfg).items():
        for one, base, of in (("lr_mult", base_lr, "lr"), ("decay_mult", base_wd, "weight_decay")):
            if one in entry:
                _check_multiplier(f"custom_keys[{short_repr(key)}][{short_repr(one)}]", entry[one], base, of)


def check_custom_options(cfg: Mapping[str, Any], options: Iterable[str]) -> None:
    """Check that the entries of ``custom_keys`` hold only multipliers and ``options`` of the optimizer.

    Raises:
        ConfigTypeError: another key, which the optimizer would never read from the group.
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


def _check_multiplier(name: str, value: object, base: object, of: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{name}={short_repr(value)} must be a number, such as 0.1")
    if not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{name}={short_repr(value)} must be finite and not negative")
    if base is None:
        raise ConfigError(
            f"{name}={short_repr(value)} multiplies {of}, which the optimizer's dict does not set; write {of}="
        )
    if isinstance(base, bool) or not isinstance(base, (int, float, Tensor)):
        raise ConfigTypeError(f"{of}={short_repr(base)} must be a number, because {name} multiplies it")
