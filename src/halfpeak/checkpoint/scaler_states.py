"""Translation of loss-scaler states between halfpeak's format and those of other libraries: pure functions of dicts.

One scaler in halfpeak's format is ``{"scale", "clean", "grace", "stuck"}`` (:class:`~halfpeak.core.schedule.ScaleState` as
plain numbers). The other formats:

=============  ======================================================================================================
apex           ``amp.state_dict()``: ``{"loss_scaler0": {"loss_scale", "unskipped"}, "loss_scaler1": ...}``
grad_scaler    ``torch.amp.GradScaler.state_dict()``
mmengine       an ``OptimWrapper``'s state: the key ``loss_scaler`` (grad_scaler) or ``apex_amp`` (apex) among others
mmcv           the ``LossScaler`` of mmcv 1.x alone; or inside a whole checkpoint or its ``meta``, where grad_scaler may
               take its place
=============  ======================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from halfpeak.core.errors import ConfigError, StateError
from halfpeak.core.schedule import ScaleConfig, ScalerState, ScaleState, parse_scaler_state, require_scale
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_count, require_mapping, require_number

Format = Literal["halfpeak", "apex", "grad_scaler", "mmengine", "mmcv"]

_OURS: Final = frozenset(ScaleState._fields)
_GRAD_SCALER: Final = frozenset(
    {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
)
_APEX_ENTRY: Final = frozenset({"loss_scale", "unskipped"})
_MMCV: Final = frozenset(
    {"cur_scale", "cur_iter", "mode", "last_overflow_iter", "scale_factor", "scale_window"}
)
_APEX_KEY: Final = re.compile(r"loss_scaler(\d+)")


def recognise(state: Mapping[str, Any]) -> Format:
    """The format of a loss-scaler state, told by its keys.

    Raises:
        StateError: the keys fit no known format.

    >>> recognise({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}})
    'apex'
    """
    keys = frozenset(_require_mapping(state))
    if keys == _OURS:
        return "halfpeak"
    if keys == _GRAD_SCALER:
        return "grad_scaler"
    if keys == _MMCV or _find_mmcv(state) is not None:
        return "mmcv"
    if "apex_amp" in keys or "loss_scaler" in keys:
        return "mmengine"
    if keys and all(_APEX_KEY.fullmatch(str(key)) for key in keys):
        return "apex"
    raise StateError(
        f"the keys {_show_keys(state)} match no known loss-scaler format; known are halfpeak's, apex's "
        "amp.state_dict(), torch's GradScaler, mmengine's OptimWrapper and mmcv's LossScaler or checkpoint"
    )


def translate(state: Mapping[str, Any]) -> list[ScalerState]:
    """The loss scalers that a state of any known format holds.

    Raises:
        StateError: the format is unknown, or a value is out of range.

    >>> translate({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}})
    [{'scale': 65536.0, 'clean': 7, 'grace': 1, 'stuck': 0}]
    """
    kind = recognise(state)
    several = {"apex": from_apex, "mmengine": from_mmengine}
    alone = {"halfpeak": parse_scaler_state, "grad_scaler": from_grad_scaler, "mmcv": from_mmcv}
    return several[kind](state) if kind in several else [alone[kind](state)]


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
        values = _require_keys(entry, _APEX_ENTRY, str(key))
        numbered[int(match[1])] = _start(values["loss_scale"], values["unskipped"], "loss_scale", "unskipped")
    return [numbered[number] for number in sorted(numbered)]


def to_apex(scalers: Sequence[ScalerState]) -> dict[str, dict[str, float | int]]:
    """The scalers as ``apex.amp.state_dict()`` returns them and ``amp.load_state_dict`` takes them.

    >>> to_apex(translate({"scale": 8.0, "clean": 3, "grace": 1, "stuck": 0}))
    {'loss_scaler0': {'loss_scale': 8.0, 'unskipped': 3}}
    """
    checked = [parse_scaler_state(scaler) for scaler in scalers]
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
    values = _require_keys(state, _GRAD_SCALER, "the GradScaler")
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        require_number(values[name], name, least=0.0)  # checked only: read_config() returns them
    return _start(values["scale"], values["_growth_tracker"], "scale", "_growth_tracker")


def to_grad_scaler(scaler: ScalerState, config: ScaleConfig | None = None) -> dict[str, float | int]:
    """The scaler as ``GradScaler.load_state_dict`` takes it, with growth, backoff and interval of ``config``."""
    rule = config or ScaleConfig()
    ours = parse_scaler_state(scaler)
    return {
        "scale": ours["scale"],
        "growth_factor": rule.growth,
        "backoff_factor": rule.backoff,
        "growth_interval": rule.interval,
        "_growth_tracker": ours["clean"],
    }


def from_mmengine(state: Mapping[str, Any]) -> list[ScalerState]:
    """The scalers in the state of an mmengine ``OptimWrapper``; the optimizer's entries are ignored.

    Raises:
        StateError: it has neither ``loss_scaler`` nor ``apex_amp``, or that entry does not fit.
    """
    if "apex_amp" in _require_mapping(state):
        return from_apex(state["apex_amp"])
    if "loss_scaler" in state:
        return [from_grad_scaler(state["loss_scaler"])]
    raise StateError(f"the state needs a key 'loss_scaler' or 'apex_amp', and has {_show_keys(state)}")


def from_mmcv(state: Mapping[str, Any]) -> ScalerState:
    """The scaler in a state of mmcv 1.x's ``LossScaler``, or in a checkpoint or its ``meta`` that holds one.

    mmcv stores the number of updates and the index of the last overflow; the scale grows whenever their distance is a
    multiple of the window. So there are ``(cur_iter - last_overflow_iter - 1) % window`` clean updates since the last
    overflow or growth.

    Raises:
        StateError: the keys or values do not fit.

    >>> from_mmcv({"cur_scale": 8.0, "cur_iter": 5, "mode": "dynamic", "last_overflow_iter": 2,
    ...            "scale_factor": 2.0, "scale_window": 1000})["clean"]
    2
    """
    state = _find_mmcv(_require_mapping(state)) or state
    if frozenset(state) == _GRAD_SCALER:
        return from_grad_scaler(state)
    values = _require_keys(state, _MMCV, "mmcv's LossScaler")
    passed = require_count(values["cur_iter"], "cur_iter")
    last = require_count(values["last_overflow_iter"], "last_overflow_iter", -1)
    window = require_count(values["scale_window"], "scale_window", 1)
    if last >= passed:
        raise StateError(f"last_overflow_iter={last} must be less than cur_iter={passed}")
    return _start(values["cur_scale"], (passed - last - 1) % window, "cur_scale", "clean")


def read_config(state: Mapping[str, Any], base: ScaleConfig | None = None) -> ScaleConfig:
    """``base`` with growth, backoff and interval of a state that has them (torch, mmengine, mmcv); else unchanged.

    Raises:
        StateError: the format is unknown, or one of these values is invalid.

    >>> read_config({"scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 10,
    ...              "_growth_tracker": 0}).growth
    4.0
    """
    config = base or ScaleConfig()
    kind = recognise(state)
    if kind in ("mmengine", "mmcv"):
        state = _find_mmcv(state) or _require_mapping(state.get("loss_scaler", state))
    try:
        if frozenset(state) == _GRAD_SCALER:
            growth, backoff = state["growth_factor"], state["backoff_factor"]
            return replace(config, growth=growth, backoff=backoff, interval=state["growth_interval"])
        if frozenset(state) == _MMCV:
            growth, dynamic = require_scale("scale_factor", state["scale_factor"]), state["mode"] != "static"
            return replace(
                config, growth=growth, backoff=1 / growth, interval=state["scale_window"], dynamic=dynamic
            )
    except ConfigError as error:
        raise StateError(str(error)) from None
    return config


def _find_mmcv(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The loss-scaler state inside an mmcv checkpoint or its ``meta``; None if there is none."""
    meta = state.get("meta", state)
    fp16 = meta.get("fp16") if isinstance(meta, Mapping) else None
    found = fp16.get("loss_scaler") if isinstance(fp16, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _start(scale: Any, clean: Any, scale_name: str, clean_name: str) -> ScalerState:
    """The state of a scaler from a library without hysteresis."""
    try:
        checked = require_scale(scale_name, scale)
    except ConfigError as error:
        raise StateError(f"{error}; nothing was loaded") from None
    return ScalerState(scale=checked, clean=require_count(clean, clean_name), grace=1, stuck=0)


def _require_mapping(state: object) -> Mapping[str, Any]:
    return require_mapping(state, "a loss-scaler state")


def _require_keys(state: Any, keys: frozenset[str], what: str) -> Mapping[str, Any]:
    if frozenset(_require_mapping(state)) != keys:
        raise StateError(f"the state of {what} must have the keys {sorted(keys)}, not {_show_keys(state)}")
    return state


def _show_keys(state: Mapping[str, Any]) -> list[str]:
    return sorted(map(str, state))
