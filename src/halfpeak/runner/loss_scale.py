"""The argument ``loss_scale=`` of mmcv's hooks, in the formats of torch, mmcv and halfpeak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.schedule import NO_FLOOR, ScaleConfig, require_scale
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_number
from halfpeak.optim.registry import unknown_key

MMCV_RULE: Final = ScaleConfig(init=2.0**32, interval=1000, floor=1.0, ceiling=2.0**32)
"""The constants of mmcv's ``LossScaler``, and a ceiling, which mmcv does not have."""

TORCH_RULE: Final = ScaleConfig(floor=NO_FLOOR)
"""The constants of ``torch.amp.GradScaler``, and a ceiling, which torch does not have."""

_NAMES: Final = {
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
    "scale_window": "interval",
}


def parse_loss_scale(loss_scale: object, rule: ScaleConfig = TORCH_RULE) -> ScaleConfig | None:
    """Return the rule for ``loss_scale``; ``rule`` gives missing constants. None for ``dict(enabled=False)``.

    Args:
        loss_scale: ``"dynamic"``; a number, which is a static scale; or a dict with keys of mmcv's ``LossScaler``
            (``init_scale``, ``mode``, ``scale_factor``, ``scale_window``), of torch's ``GradScaler``, or of
            :class:`~halfpeak.ScaleConfig`.

    Raises:
        ConfigTypeError: anything else, or an unknown key.
        ConfigError: a value out of range.

    >>> parse_loss_scale({"init_scale": 512.0, "scale_factor": 4.0}, MMCV_RULE)
    ScaleConfig(init=512.0, dynamic=True, growth=4.0, backoff=0.25, interval=1000, ...)
    >>> parse_loss_scale({"enabled": False})
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return rule
    if isinstance(loss_scale, Mapping):
        return _parse_dict(loss_scale, rule)
    if not is_number(loss_scale):
        raise ConfigTypeError(
            f"loss_scale must be of type float, int or dict, or 'dynamic', not {short_repr(loss_scale)}; write "
            "loss_scale='dynamic' or loss_scale=512.0"
        )
    return ScaleConfig.static(require_scale("loss_scale", loss_scale))


def _parse_dict(given: Mapping[str, Any], rule: ScaleConfig) -> ScaleConfig | None:
    own = [field.name for field in fields(ScaleConfig)]
    allowed = [*_NAMES, "mode", "scale_factor", "enabled", *own]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in allowed:
            raise ConfigTypeError(unknown_key("loss_scale", key, allowed))
        if key == "mode":
            if value not in ("dynamic", "static"):
                raise ConfigError(f"mode={short_repr(value)} in loss_scale must be 'dynamic' or 'static'")
            values["dynamic"] = value == "dynamic"
        elif key == "scale_factor":
            values["growth"] = require_scale("scale_factor", value)
            values["backoff"] = 1 / values["growth"]
        elif key == "enabled":
            if not isinstance(value, bool):
                raise ConfigTypeError(f"enabled={short_repr(value)} in loss_scale must be True or False")
        else:
            values[_NAMES.get(key, key)] = value
    try:
        config = _with_bounds(rule, values)
    except ConfigError as error:
        raise ConfigError(f"loss_scale={short_repr(dict(given))}: {error}") from None
    return config if given.get("enabled", True) else None


def _with_bounds(rule: ScaleConfig, values: Mapping[str, Any]) -> ScaleConfig:
    """Return ``rule`` with ``values``; an initial scale out of bounds moves the bounds that ``values`` does not set."""
    config = replace(rule, **values)
    bounds = {"floor": min(config.floor, config.init), "ceiling": max(config.ceiling, config.init)}
    return replace(config, **{name: bound for name, bound in bounds.items() if name not in values})
