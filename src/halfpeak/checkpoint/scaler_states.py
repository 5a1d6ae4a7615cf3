"""Translation of loss-scaler states between halfpeak's format and those of other libraries: pure functions of dicts.

One scaler in halfpeak's format is ``{"scale", "clean", "grace", "stuck"}`` (:class:`~halfpeak.core.schedule.ScaleState` as
plain numbers). The other formats:

===========  ========================================================================================================
apex         ``amp.state_dict()``: ``{"loss_scaler0": {"loss_scale", "unskipped"}, "loss_scaler1": ...}``
grad_scaler  ``torch.amp.GradScaler.state_dict()``, which mmengine and Lightning save, and mmcv with today's torch
mmcv         the ``LossScaler`` of mmcv 1.x
===========  ========================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from halfpeak.core.errors import ConfigError, StateError
from halfpeak.core.schedule import (
    SCALER_STATE,
    ScaleConfig,
    ScalerState,
    ScaleState,
    require_saved_scale,
    require_scale,
)
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import Schema, require, require_count, require_mapping, require_number

Format = Literal["halfpeak", "apex", "grad_scaler", "mmcv"]

_SCHEMAS: Final[Mapping[Format, Mapping[str, Schema]]] = {
    "halfpeak": SCALER_STATE,
    "grad_scaler": {
        "scale": require_saved_scale,
        "growth_factor": partial(require_number, least=0.0),
        "backoff_factor": partial(require_number, least=0.0),
        "growth_interval": partial(require_number, least=0.0),
        "_growth_tracker": require_count,
    },
    "mmcv": {
        "cur_scale": require_saved_scale,
        "cur_iter": require_count,
        "mode": ...,
        "last_overflow_iter": partial(require_count, least=-1),
        "scale_factor": ...,
        "scale_window": partial(require_count, least=1),
    },
}
_APEX_ENTRY: Final[Schema] = {"loss_scale": require_saved_scale, "unskipped": require_count, object: ...}
"""Forks of apex may save more, which apex itself does not look at."""
_APEX_KEY: Final = re.compile(r"loss_scaler(\d+)")


def recognise(state: Mapping[str, Any]) -> Format:
    """The format of a loss-scaler state, told by its keys.

    Raises:
        StateError: the keys fit no known format.

    >>> recognise({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}})
    'apex'
    """
    keys = _require_mapping(state).keys()
    for kind, schema in _SCHEMAS.items():
        if keys == schema.keys():
            return kind
    if keys and all(_APEX_KEY.fullmatch(str(key)) for key in keys):
        return "apex"
    raise StateError(
        f"the keys {_show_keys(state)} match no known loss-scaler format; known are halfpeak's, apex's "
        "amp.state_dict(), torch's GradScaler and mmcv's LossScaler"
    )


def translate(state: Mapping[str, Any]) -> list[ScalerState]:
    """The loss scalers that a state of any known format holds.

    Raises:
        StateError: the format is unknown, or a value is out of range.

    >>> translate({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}})
    [{'scale': 65536.0, 'clean': 7, 'grace': 1, 'stuck': 0}]
    """
    kind = recognise(state)
    if kind == "apex":
        return from_apex(state)
    alone = {"halfpeak": from_halfpeak, "grad_scaler": from_grad_scaler, "mmcv": from_mmcv}
    return [alone[kind](state)]


def from_halfpeak(state: Mapping[str, Any]) -> ScalerState:
    """A scaler in halfpeak's own format, checked and copied.

    Raises:
        StateError: the keys or values do not fit.
    """
    scale, clean, grace, stuck = map(require(state, "state", SCALER_STATE).__getitem__, ScaleState._fields)
    return ScalerState(scale=float(scale), clean=clean, grace=grace, stuck=stuck)


def from_apex(state: Mapping[str, Any]) -> list[ScalerState]:
    """The scalers of ``apex.amp.state_dict()``, in the order of their numbers.

    Raises:
        StateError: a key that is not ``loss_scaler<number>``, or an entry that does not fit.
    """
    numbered: dict[int, ScalerState] = {}
    for key, entry in _require_mapping(state).items():
        match = _APEX_KEY.fullmatch(str(key))
        if match is None:
            raise StateError(
                f"unexpected key {short_repr(key)} in apex's state; its keys are 'loss_scaler0', 'loss_scaler1', ..."
            )
        require(entry, f"state['{match[0]}']", _APEX_ENTRY)
        numbered[int(match[1])] = _start(entry["loss_scale"], entry["unskipped"])
    return [numbered[number] for number in sorted(numbered)]


def to_apex(scalers: Sequence[ScalerState]) -> dict[str, dict[str, float | int]]:
    """The scalers as ``apex.amp.state_dict()`` returns them and ``amp.load_state_dict`` takes them.

    >>> to_apex(translate({"scale": 8.0, "clean": 3, "grace": 1, "stuck": 0}))
    {'loss_scaler0': {'loss_scale': 8.0, 'unskipped': 3}}
    """
    checked = map(from_halfpeak, scalers)
    return {
        f"loss_scaler{i}": {"loss_scale": s["scale"], "unskipped": s["clean"]} for i, s in enumerate(checked)
    }


def from_grad_scaler(state: Mapping[str, Any]) -> ScalerState:
    """The scaler of ``torch.amp.GradScaler.state_dict()``.

    Raises:
        StateError: the keys or values do not fit; also for ``{}``, which a disabled ``GradScaler`` gives.
    """
    if not _require_mapping(state):
        raise StateError("{} is the state of a disabled GradScaler, which has no scale; leave it out")
    require(state, "state", _SCHEMAS["grad_scaler"])
    return _start(state["scale"], state["_growth_tracker"])


def to_grad_scaler(scaler: ScalerState, config: ScaleConfig | None = None) -> dict[str, float | int]:
    """The scaler as ``GradScaler.load_state_dict`` takes it, with growth, backoff and interval of ``config``."""
    rule = config or ScaleConfig()
    ours = from_halfpeak(scaler)
    return {
        "scale": ours["scale"],
        "growth_factor": rule.growth,
        "backoff_factor": rule.backoff,
        "growth_interval": rule.interval,
        "_growth_tracker": ours["clean"],
    }


def from_mmcv(state: Mapping[str, Any]) -> ScalerState:
    """The scaler in a state of mmcv 1.x's ``LossScaler``, or of the ``GradScaler`` that mmcv saves in its place.

    mmcv stores the number of updates and the index of the last overflow; the scale grows whenever their distance is a
    multiple of the window. So there are ``(cur_iter - last_overflow_iter - 1) % window`` clean updates since the last
    overflow or growth.

    Raises:
        StateError: the keys or values do not fit.

    >>> from_mmcv({"cur_scale": 8.0, "cur_iter": 5, "mode": "dynamic", "last_overflow_iter": 2,
    ...            "scale_factor": 2.0, "scale_window": 1000})["clean"]
    2
    """
    if _require_mapping(state).keys() == _SCHEMAS["grad_scaler"].keys():
        return from_grad_scaler(state)
    require(state, "state", _SCHEMAS["mmcv"])
    passed, last = state["cur_iter"], state["last_overflow_iter"]
    if last >= passed:
        raise StateError(f"last_overflow_iter={last} must be less than cur_iter={passed}")
    return _start(state["cur_scale"], (passed - last - 1) % state["scale_window"])


def read_config(state: Mapping[str, Any], base: ScaleConfig | None = None) -> ScaleConfig:
    """``base`` with growth, backoff and interval of a state that has them (torch, mmcv); else unchanged.

    Raises:
        StateError: the format is unknown, or one of these values is invalid.

    >>> read_config({"scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 10,
    ...              "_growth_tracker": 0}).growth
    4.0
    """
    config = base or ScaleConfig()
    kind = recognise(state)
    try:
        if kind == "grad_scaler":
            growth, backoff = state["growth_factor"], state["backoff_factor"]
            return replace(config, growth=growth, backoff=backoff, interval=state["growth_interval"])
        if kind == "mmcv":
            growth, dynamic = require_scale("scale_factor", state["scale_factor"]), state["mode"] != "static"
            return replace(
                config, growth=growth, backoff=1 / growth, interval=state["scale_window"], dynamic=dynamic
            )
    except ConfigError as error:
        raise StateError(str(error)) from None
    return config


def _start(scale: float, clean: int) -> ScalerState:
    """The state of a scaler from a library without hysteresis."""
    return ScalerState(scale=float(scale), clean=clean, grace=1, stuck=0)


def _require_mapping(state: object) -> Mapping[str, Any]:
    return require_mapping(state, "a loss-scaler state")


def _show_keys(state: Mapping[str, Any]) -> list[str]:
    return sorted(map(str, state))
