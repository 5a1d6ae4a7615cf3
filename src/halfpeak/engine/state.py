"""The state of an engine as plain data: everything that a bitwise resume needs, at any moment between two calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfpeak.engine.lane import Lane
from halfpeak.engine.slots import Phase, Slots
from halfpeak.engine.state_checks import VERSION, check_state, check_window
from halfpeak.parts.loss_scaler import LossScaler

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine


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
    check_state(engine, state)
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
    engine.phases.look_for_trouble()
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
    # Lanes whose gradients wait under one scale share the tensor.
    scales: dict[tuple[int, float], Tensor] = {}
    for lane, saved in zip(engine.lanes, window["lanes"], strict=True):
        _open_window(lane, saved, engine.scalers, scales)
    engine.journal.cancel()
    for index, found_inf in window["losses"].items():
        engine.journal.note(engine.scalers[index], found_inf.to(engine.device, copy=True))


def _window_of(lane: Lane, scalers: Sequence[LossScaler]) -> dict[str, Any]:
    lane.take_in()
    # Numbered among all parameters of the groups: some may freeze inside the window.
    own = set(map(id, lane.slots().sources))
    slots = [(i, slot) for i, slot in enumerate(lane.roster().everyone) if id(slot.source) in own]
    is_open = lane.phase is not Phase.CLEAN
    return {
        "phase": lane.phase.name,
        "found_inf": lane.found_inf.clone(),
        "true_sized": {
            i: s.target.grad
            for i, s in slots
            if is_open and s.target.grad is not None and s.target is not lane.trace.marker
        },
        "scaled": {
            i: s.source.grad
            for i, s in slots
            if lane.phase is Phase.SCALED and s.source is not s.target and s.source.grad is not None
        },
        "frozen": None if lane.frozen is None else (scalers.index(lane.frozen[0]), lane.frozen[1].clone()),
        "parked": {i: lane.parked[id(s.source)] for i, s in slots if id(s.source) in lane.parked},
    }


def _open_window(
    lane: Lane,
    saved: Mapping[str, Any],
    scalers: Sequence[LossScaler],
    scales: dict[tuple[int, float], Tensor],
) -> None:
    lane.drop()
    slots = lane.roster().everyone
    for index, grad in saved["true_sized"].items():
        target = slots[index].target
        target.grad = grad.detach().to(target.device, copy=True)
    for index, grad in saved["scaled"].items():
        source = slots[index].source
        source.grad = grad.detach().to(source.device, copy=True)
    for index, grad in saved["parked"].items():
        source = slots[index].source
        lane.parked[id(source)] = grad.detach().to(source.device, copy=True)
    lane.include(Slots(slots[index] for index in sorted({*saved["true_sized"], *saved["scaled"]})))
    if saved["frozen"] is not None:
        index, scale = saved["frozen"]
        scale = scales.setdefault((index, float(scale)), scale.to(lane.found_inf.device, copy=True))
        lane.frozen = (scalers[index], scale)
    lane.found_inf = saved["found_inf"].to(lane.found_inf.device, copy=True)
    lane.phase = Phase[saved["phase"]]
    if lane.phase is Phase.UNSCALED:
        lane.keep_trace()
    elif lane.phase is Phase.SCALED:
        lane.keep_marker()
