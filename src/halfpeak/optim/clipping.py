"""The ``clip_grad`` argument of a wrapper, checked when the wrapper is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError
from halfpeak.core.keywords import unknown_key
from halfpeak.core.short_repr import short_repr
from halfpeak.parts.clip import Clip, ClipNorm, ClipValue, NoClip

_KEYS: Final = {
    "norm": ("max_norm", "norm_type", "error_if_nonfinite", "foreach"),
    "value": ("clip_value", "foreach"),
}
"""The keys of each type; the first is required."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrictClipNorm:
    """Clip by norm, or raise if the norm is not finite (``error_if_nonfinite=True``). Waits for the device."""

    clip: ClipNorm

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """Clip in place; return the norm before clipping.

        Raises:
            OrderError: the norm is not finite.
        """
        norm = self.clip(grads)
        if not bool(norm.isfinite()):
            raise OrderError(
                f"the gradient norm is {float(norm)} and clip_grad has error_if_nonfinite=True; leave that out, and such "
                "steps are skipped"
            )
        return norm


def parse_clip_grad(clip_grad: Mapping[str, Any] | None, name: str = "clip_grad") -> Clip:
    """Parse ``dict(max_norm=1.0)``, ``dict(type='norm', ...)``, ``dict(type='value', clip_value=0.2)`` or None.

    None clips nothing. ``foreach`` has no effect: lists are always clipped together. ``name`` is for error messages.

    Raises:
        ConfigTypeError: not a dict, an unknown key, or a flag that is not a bool.
        ConfigError: an empty dict, an unknown type, or a value out of range.

    >>> parse_clip_grad({"type": "value", "clip_value": 0.5})
    ClipValue(value=0.5)
    """
    if clip_grad is None:
        return NoClip()
    if not isinstance(clip_grad, Mapping):
        raise ConfigTypeError(
            f"If `{name}` is not None, it must be a dict, not {short_repr(clip_grad)}; write dict(max_norm=1.0)"
        )
    given = dict(clip_grad)
    kind = given.pop("type", "norm")
    if kind not in ("norm", "value"):
        raise ConfigError(f'type of {name} should be "norm" or "value", not {short_repr(kind)}')
    required = _KEYS[kind][0]
    for key in given:
        if key in _KEYS["value"] and key not in _KEYS[kind]:
            raise ConfigTypeError(
                f"{short_repr(key)} in {name} clips by value; write dict(type='value', {key}={short_repr(given[key])})"
            )
        if key not in _KEYS[kind]:
            raise ConfigTypeError(unknown_key(f"{name} of type {kind!r}", key, _KEYS[kind]))
    if required not in given:
        raise ConfigError(
            f"If `{name}` is not None, it must have a limit: {short_repr(dict(clip_grad))} lacks {required!r}; write "
            f"dict(type={short_repr(kind)}, {required}=1.0)"
        )
    for flag in ("error_if_nonfinite", "foreach"):
        if not isinstance(given.get(flag, False), bool | None):
            raise ConfigTypeError(f"{flag}={short_repr(given[flag])} in {name} must be True or False")
    try:
        return _clip(kind, given)
    except ConfigError as error:
        raise ConfigError(f"{name}={short_repr(dict(clip_grad))}: {error}") from None


def _clip(kind: str, given: Mapping[str, Any]) -> Clip:
    if kind == "value":
        return ClipValue(value=given["clip_value"])
    norm_type = given.get("norm_type", 2.0)
    # Configuration files can write infinity only as a string.
    clip = ClipNorm(max_norm=given["max_norm"], norm_type=float("inf") if norm_type == "inf" else norm_type)
    return StrictClipNorm(clip=clip) if given.get("error_if_nonfinite") else clip
