"""Whether a state fits an engine. Everything here only looks, so that a refused load has changed nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.engine.lane import Lane
from halfpeak.engine.slots import Phase
from halfpeak.fused.optimizer import FusedOptimizer

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine

VERSION: Final = 1
_KEYS: Final = ("version", "level", "models", "optimizers", "scalers", "counters", "buffers", "window")
_LANE_KEYS: Final = ("phase", "found_inf", "true_sized", "scaled", "frozen", "parked")
_PER_ELEMENT: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def check_state(engine: Engine, state: object) -> None:
    """Check what :func:`halfpeak.engine.state.put_state` would restore.

    Raises:
        StateError: it does not fit.
    """
    known = _mapping(state, "an engine's state", _KEYS)
    if known["version"] != VERSION:
        raise StateError(
            f"state version {known['version']!r} is not {VERSION}; it was saved by another halfpeak"
        )
    for model, saved in zip(
        engine.models, _listed(known["models"], "models", len(engine.models)), strict=True
    ):
        _check_model(model, saved)
    optimizers = _listed(known["optimizers"], "optimizers", len(engine.lanes))
    for optimizer, saved in zip(engine.optimizers, optimizers, strict=True):
        check_optimizer(optimizer, saved)
    for scaler, saved in zip(
        engine.scalers, _listed(known["scalers"], "scalers", len(engine.scalers)), strict=True
    ):
        scaler.parse(saved)
    for name, value in _mapping(known["counters"], "the counters", ("taken", "skipped", "index")).items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31 - 1:
            raise StateError(f"the counter {name} must be an integer of 0 or more, not {value!r}")
    for flat in _listed(known["buffers"], "saved statistics"):
        _require_tensor(flat, "a saved statistic")
    check_window(engine, known["window"])


def check_optimizer(optimizer: Optimizer, saved: object) -> None:
    """Check an optimizer's state before it is loaded.

    Raises:
        StateError: its groups or its tensors have other sizes, or something in it is no data.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise StateError("an optimizer's state must be a dict with 'state' and 'param_groups'")
    groups = [_mapping(group, "a parameter group") for group in _listed(saved["param_groups"], "groups")]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(_listed(group.get("params"), "parameters of a group")) for group in groups]
    if sizes != given:
        raise StateError(f"the optimizer's groups hold {sizes} parameters, those of the state {given}")
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for name, value in group.items():
            if _is_number(own.get(name)) and not _is_number(value) and not isinstance(value, Tensor):
                raise StateError(f"{name}={value!r} in the state's parameter group must be a number")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in _mapping(saved["state"], "the state of an optimizer's parameters").items():
        if isinstance(index, int):
            if not 0 <= index < len(parameters):
                raise StateError(f"the state speaks of parameter {index} of {len(parameters)}")
            _check_entries(index, parameters[index], entries)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.check_state(saved)


def check_window(engine: Engine, window: object) -> None:
    """Check what :func:`halfpeak.engine.state.put_window` would restore.

    Raises:
        StateError: it does not fit.
    """
    known = _mapping(window, "the state's window", ("lanes", "losses"))
    lanes = _listed(known["lanes"], "optimizers in its window", len(engine.lanes))
    for lane, saved in zip(engine.lanes, lanes, strict=True):
        _check_lane(lane, _mapping(saved, "a window of the state", _LANE_KEYS), len(engine.scalers))
    for index, found_inf in _mapping(known["losses"], "the losses of the state's window").items():
        _require_loss(index, len(engine.scalers))
        _require_tensor(found_inf, "the found_inf of a loss", ())


def _check_model(model: nn.Module, saved: object) -> None:
    given = _mapping(saved, "a model's state")
    own = model.state_dict()
    if set(given) != set(own):
        missing, unexpected = sorted(set(own) - set(given)), sorted(map(str, set(given) - set(own)))
        raise StateError(
            f"the model's state does not fit: missing {missing[:5]}, unexpected {unexpected[:5]}"
        )
    for key, value in own.items():
        if isinstance(value, Tensor):
            found = _require_tensor(given[key], key, tuple(value.shape))
            if found.is_floating_point() != value.is_floating_point():
                raise StateError(f"{key} is {found.dtype} in the state and {value.dtype} in the model")


def _check_entries(index: int, parameter: Tensor, entries: object) -> None:
    for name, value in _mapping(entries, f"the state of parameter {index}").items():
        if isinstance(value, (str, bytes)):
            raise StateError(f"{name} of parameter {index} is {value!r}")
        if name in _PER_ELEMENT and isinstance(value, Tensor) and value.dim() > 0:
            _require_tensor(value, f"{name} of parameter {index}", tuple(parameter.shape))


def _check_lane(lane: Lane, saved: Mapping[str, Any], losses: int) -> None:
    slots = lane.roster().everyone
    if saved["phase"] not in Phase.__members__:
        raise StateError(f"unknown phase {saved['phase']!r} in the state's window")
    _require_tensor(saved["found_inf"], "found_inf", ())
    for name in ("true_sized", "scaled", "parked"):
        for index, grad in _mapping(saved[name], f"the {name} gradients of the state's window").items():
            if not isinstance(index, int) or not 0 <= index < len(slots):
                raise StateError(f"gradient {index!r} ({name}) of the state's window fits no parameter")
            _require_tensor(grad, f"gradient {index} ({name})", tuple(slots[index].target.shape))
    if saved["frozen"] is not None:
        loss, scale = _listed(saved["frozen"], "parts of a frozen scale", 2)
        _require_loss(loss, losses)
        _require_tensor(scale, "a frozen scale", ())


def _mapping(value: object, what: str, keys: tuple[str, ...] | None = None) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise StateError(f"{what} must be a dict, not {type(value).__name__}; pass engine.state_dict()")
    if keys is not None and set(value) != set(keys):
        found = sorted(map(str, value))
        raise StateError(f"{what} has the keys {sorted(keys)}, not {found}; pass engine.state_dict()")
    return value


def _listed(value: object, what: str, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise StateError(f"the {what} of the state must be a list, not {type(value).__name__}")
    if length is not None and len(value) != length:
        raise StateError(f"the state holds {len(value)} {what}, the engine {length}")
    return value


def _require_tensor(value: object, what: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if not isinstance(value, Tensor):
        raise StateError(f"{what} is {type(value).__name__} in the state and should be a tensor")
    if shape is not None and tuple(value.shape) != shape:
        raise StateError(f"{what} is {tuple(value.shape)} in the state and should be {shape}")
    return value


def _require_loss(index: object, losses: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < losses:
        raise StateError(f"the state's window names loss {index!r} of {losses}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
