"""The state of an engine as plain data: everything that a bitwise resume needs, at any moment between two calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.engine.lane import Lane, Phase
from halfpeak.parts.loss_scaler import LossScaler

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine

VERSION: Final = 1
_KEYS: Final = frozenset(
    {"version", "level", "models", "optimizers", "scalers", "counters", "buffers", "window"}
)


def take_state(engine: Engine) -> dict[str, Any]:
    """The state: tensors and plain values only. Tensors are live, as in torch; save or copy them before going on."""
    return {
        "version": VERSION,
        "level": engine.plan.properties.opt_level,
        "models": [model.state_dict() for model in engine.models],
        "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
        "scalers": [scaler.state_dict() for scaler in engine.scalers],
        "counters": engine.journal.state_dict(),
        "buffers": engine.buffers.saved(),
        "window": take_window(engine),
    }


def put_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restore what :func:`take_state` gave. Everything is checked before anything is loaded.

    Raises:
        StateError: the state does not fit the engine. Nothing was loaded.
    """
    _check(engine, state)
    scales = [scaler.parse(saved) for scaler, saved in zip(engine.scalers, state["scalers"], strict=True)]
    for model, saved in zip(engine.models, state["models"], strict=True):
        model.load_state_dict(saved)
    for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
        # torch keeps the tensors it is given: without a copy, training on would change the caller's state.
        optimizer.load_state_dict(copy.deepcopy(saved))
    for scaler, scale in zip(engine.scalers, scales, strict=True):
        scaler.state = scale
    engine.journal.load_state_dict(state["counters"])
    engine.buffers.put_saved(state["buffers"])
    put_window(engine, state["window"])


def take_window(engine: Engine) -> dict[str, Any]:
    """The open accumulation window: gradients taken in so far, where they stand, and what was found in them."""
    return {
        "lanes": [_window_of(lane, engine.scalers) for lane in engine.lanes],
        "losses": {
            engine.scalers.index(scaler): found_inf.clone() for scaler, found_inf in engine.journal.noted
        },
    }


def put_window(engine: Engine, window: Mapping[str, Any]) -> None:
    """Restore what :func:`take_window` gave.

    Raises:
        StateError: it does not fit. Nothing was loaded.
    """
    check_window(engine, window)
    for lane, saved in zip(engine.lanes, window["lanes"], strict=True):
        _open_window(lane, saved, engine.scalers)
    engine.journal.cancel()
    for index, found_inf in window["losses"].items():
        engine.journal.note(engine.scalers[index], found_inf.to(engine.device, copy=True))


def _window_of(lane: Lane, scalers: Sequence[LossScaler]) -> dict[str, Any]:
    slots = list(lane.slots())
    is_open = lane.phase is not Phase.CLEAN
    return {
        "phase": lane.phase.name,
        "found_inf": lane.found_inf.clone(),
        "true_sized": {
            i: s.target.grad
            for i, s in enumerate(slots)
            if is_open and s.target.grad is not None and s.target is not lane.marker
        },
        "scaled": {
            i: s.source.grad
            for i, s in enumerate(slots)
            if lane.phase is Phase.SCALED and s.source is not s.target and s.source.grad is not None
        },
        "frozen": None if lane.frozen is None else (scalers.index(lane.frozen[0]), lane.frozen[1].clone()),
        "parked": {i: lane.parked[id(s.source)] for i, s in enumerate(slots) if id(s.source) in lane.parked},
    }


def _open_window(lane: Lane, saved: Mapping[str, Any], scalers: Sequence[LossScaler]) -> None:
    lane.drop()
    slots = list(lane.slots())
    for index, grad in saved["true_sized"].items():
        target = slots[index].target
        target.grad = grad.detach().to(target.device, copy=True)
    for index, grad in saved["scaled"].items():
        source = slots[index].source
        source.grad = grad.detach().to(source.device, copy=True)
    for index, grad in saved["parked"].items():
        source = slots[index].source
        lane.parked[id(source)] = grad.detach().to(source.device, copy=True)
    if saved["frozen"] is not None:
        index, scale = saved["frozen"]
        lane.frozen = (scalers[index], scale.to(lane.found_inf.device, copy=True))
    lane.found_inf = saved["found_inf"].to(lane.found_inf.device, copy=True)
    lane.phase = Phase[saved["phase"]]
    if lane.phase is Phase.UNSCALED:
        lane.keep_trace()
    elif lane.phase is Phase.SCALED:
        lane.keep_marker()


def _check(engine: Engine, state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or frozenset(state) != _KEYS:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(
            f"an engine's state has the keys {sorted(_KEYS)}, not {found}; pass engine.state_dict()"
        )
    if state["version"] != VERSION:
        raise StateError(
            f"state version {state['version']!r} is not {VERSION}; it was saved by another halfpeak"
        )
    for name, own in (("models", engine.models), ("optimizers", engine.lanes), ("scalers", engine.scalers)):
        if not isinstance(state[name], Sequence) or len(state[name]) != len(own):
            raise StateError(f"the state holds {_count(state[name])} {name}, the engine {len(own)}")
    for model, saved in zip(engine.models, state["models"], strict=True):
        _check_model(model, saved)
    for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
        check_optimizer(optimizer, saved)
    counters = state["counters"]
    if not isinstance(counters, Mapping) or set(counters) != {"taken", "skipped", "index"}:
        raise StateError("the state's counters must be 'taken', 'skipped' and 'index'")
    if not all(isinstance(value, int) and value >= 0 for value in counters.values()):
        raise StateError(f"the state's counters must be integers of 0 or more, not {dict(counters)}")
    check_window(engine, state["window"])


def _check_model(model: nn.Module, saved: object) -> None:
    if not isinstance(saved, Mapping):
        raise StateError(f"a model's state must be a dict, not {type(saved).__name__}")
    own = model.state_dict()
    if set(saved) != set(own):
        missing, unexpected = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
        raise StateError(
            f"the model's state does not fit: missing {missing[:5]}, unexpected {unexpected[:5]}"
        )
    for key, value in own.items():
        if isinstance(value, Tensor):
            shape = tuple(saved[key].shape) if isinstance(saved[key], Tensor) else type(saved[key]).__name__
            if shape != tuple(value.shape):
                raise StateError(f"{key} is {shape} in the state and {tuple(value.shape)} in the model")


def check_optimizer(optimizer: Optimizer, saved: object) -> None:
    """Check an optimizer's state before it is loaded.

    Raises:
        StateError: its groups or its tensors have other sizes.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise StateError("an optimizer's state must be a dict with 'state' and 'param_groups'")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != given:
        raise StateError(f"the optimizer's groups hold {sizes} parameters, those of the state {given}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in saved["state"].items():
        if not isinstance(index, int) or not 0 <= index < len(parameters):
            continue
        for name, value in entries.items():
            if (
                isinstance(value, Tensor)
                and value.dim() > 0
                and name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
            ):
                shape = tuple(parameters[index].shape)
                if tuple(value.shape) != shape:
                    raise StateError(
                        f"{name} of parameter {index} is {tuple(value.shape)} and should be {shape}"
                    )


def check_window(engine: Engine, window: object) -> None:
    """Check what :func:`put_window` would restore.

    Raises:
        StateError: it does not fit.
    """
    if not isinstance(window, Mapping) or set(window) != {"lanes", "losses"}:
        raise StateError("the state's window must be a dict with 'lanes' and 'losses'")
    if len(window["lanes"]) != len(engine.lanes):
        raise StateError(
            f"the state's window has {_count(window['lanes'])} optimizers, the engine {len(engine.lanes)}"
        )
    for lane, saved in zip(engine.lanes, window["lanes"], strict=True):
        slots = list(lane.slots())
        if set(saved) != {"phase", "found_inf", "true_sized", "scaled", "frozen", "parked"}:
            raise StateError(f"a window of the state has the keys {sorted(saved)}; pass engine.state_dict()")
        if saved["phase"] not in Phase.__members__:
            raise StateError(f"unknown phase {saved['phase']!r} in the state's window")
        for name in ("true_sized", "scaled", "parked"):
            for index, grad in saved[name].items():
                if not 0 <= index < len(slots) or slots[index].target.shape != grad.shape:
                    raise StateError(
                        f"gradient {index} ({name}) of the state's window fits no trainable parameter"
                    )
    if not all(isinstance(i, int) and 0 <= i < len(engine.scalers) for i in window["losses"]):
        raise StateError(
            f"the state's window names losses {sorted(window['losses'])} of {len(engine.scalers)}"
        )


def _count(value: object) -> int | str:
    return len(value) if isinstance(value, Sequence) else type(value).__name__
