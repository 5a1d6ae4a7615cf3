"""Saves and loads the state of an engine as plain data, for a bitwise resume between any two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError, StateError
from halfpeak.core.optimizer_state import renamed, row_of
from halfpeak.core.schedule import NONFINITE_LOSS
from halfpeak.core.state_checks import copied
from halfpeak.distributed.optimizer_state import with_initial_moments
from halfpeak.engine.context import EngineContext
from halfpeak.engine.gradients.params import ParamPair, ParamPairs
from halfpeak.engine.gradients.window import (
    Empty,
    GradSnapshot,
    Scaled,
    Unscaled,
    after_delayed_backward,
)
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.engine.state_checks import VERSION, check_loop_state, check_state, check_window, numbered_state
from halfpeak.ops.shards import has_process_group, has_shards
from halfpeak.state.found_inf import is_multi_rank, rank_and_count
from halfpeak.state.loss_scaler import LossScaler


def save_state(context: EngineContext) -> dict[str, Any]:
    """The state, as tensors and plain values. Tensors are live, as in torch: save or copy them before the next step.

    A distributed checkpoint is read into the tensors of a state, by key. So with a process group, parameters that were
    never stepped have moments, too, and optimizer state is keyed by parameter name.

    Raises:
        OrderError: a window is open over shards, because FSDP2 holds their gradients in buffers that cannot be read.
        StateError: the state dict of an optimizer is not of torch's form.
    """
    if has_process_group():
        optimizers = [
            renamed(state, dict(enumerate(context.names_of(one))))
            for one, state in zip(context.prepared, optimizer_states(context), strict=True)
        ]
    else:
        optimizers = [_state_of(optimizer) for optimizer in context.optimizers]
    return {
        "version": VERSION,
        "level": context.config.properties.opt_level,
        "models": [model.state_dict() for model in context.models],
        "optimizers": optimizers,
        "scalers": [scaler.state_dict() for scaler in context.scalers],
        "counters": context.record.state_dict(),
        "buffers": context.stats.saved(),
        "window": save_window(context),
    }


def optimizer_states(context: EngineContext) -> list[dict[str, Any]]:
    """The states of the optimizers, with moments also for parameters that were never stepped."""
    return [with_initial_moments(optimizer, _state_of(optimizer)) for optimizer in context.optimizers]


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()``.

    Raises:
        StateError: it is not of torch's form, so it could not be checked or loaded.
    """
    state = optimizer.state_dict()
    if "state" not in state or "param_groups" not in state:
        raise StateError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}.state_dict() has the keys {list(state)}, and a state "
            "dict of torch.optim has 'state' and 'param_groups'; use an optimizer with such a state dict, for Lookahead that "
            "of timm.optim"
        )
    return state


def load_state(context: EngineContext, state: Mapping[str, Any]) -> None:
    """Restore what :func:`save_state` gave. Everything is checked before anything is loaded.

    Raises:
        StateError: the state does not fit the engine. Nothing was loaded.
    """
    check_state(context, state)
    scales = [scaler.parse(saved) for scaler, saved in zip(context.scalers, state["scalers"], strict=True)]
    # torch keeps the tensors it is given: without a copy, later steps would write into the caller's state.
    optimizers = [
        copied(numbered_state(context, one, saved), "an optimizer's state")
        for one, saved in zip(context.prepared, state["optimizers"], strict=True)
    ]
    for model, saved in zip(context.models, state["models"], strict=True):
        model.load_state_dict(saved)
    for optimizer, saved in zip(context.optimizers, optimizers, strict=True):
        optimizer.load_state_dict(saved)
        _keep_scalars_wide(optimizer, saved)
    for scaler, scale in zip(context.scalers, scales, strict=True):
        scaler.state = scale
    context.record.load_state_dict(state["counters"])
    context.stats.restore_saved(state["buffers"], is_loaded=True)
    context.train_step.poll_stuck()
    load_window(context, state["window"])


def _keep_scalars_wide(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of scalar state to the parameter's dtype: NAdam and ASGD keep scalars in float32."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        row = row_of(optimizer, parameter)
        for name, value in (saved["state"].get(number) or {}).items():
            loaded = row.get(name)
            if isinstance(value, Tensor) and value.dim() == 0 and isinstance(loaded, Tensor):
                row[name] = value.to(loaded.device)


def save_loop_state(context: EngineContext) -> dict[str, Any]:
    """The state without models and optimizers, for a loop of another library that saves these itself."""
    return {
        "level": context.config.properties.opt_level,
        "scalers": [scaler.state_dict() for scaler in context.scalers],
        "counters": context.record.state_dict(),
        "window": save_window(context),
        # Between two windows a skipped step restores what the model itself holds.
        "buffers": context.stats.saved() if any(one.is_open for one in context.prepared) else [],
    }


def load_loop_state(context: EngineContext, state: Mapping[str, Any]) -> None:
    """Restore what :func:`save_loop_state` gave. A static scale stays; a saved window of None changes nothing.

    Raises:
        StateError: the state does not fit. Nothing was loaded.
    """
    check_loop_state(context, state)
    scales = [scaler.parse(saved) for scaler, saved in zip(context.scalers, state["scalers"], strict=True)]
    context.record.load_state_dict(state["counters"])
    for scaler, scale in zip(context.scalers, scales, strict=True):
        scaler.state = scale if scaler.config.dynamic else scale._replace(scale=scaler.state.scale)
    context.train_step.poll_stuck()
    if state["window"] is not None:
        load_window(context, state["window"])
        context.stats.restore_saved(state["buffers"])


def save_window(context: EngineContext) -> dict[str, Any]:
    """The open accumulation window: its gradients so far, whether they are scaled, and their ``found_inf``.

    The keys are names on disk, which :mod:`halfpeak.engine.state_checks` explains.

    Raises:
        OrderError: a window is open over shards, because FSDP2 holds their gradients in buffers that cannot be read; or
            user code wrote to gradients that wait scaled.
    """
    if any(one.is_open and has_shards(one.table().main_params) for one in context.prepared):
        raise OrderError(
            "a window is open, and its gradients lie in buffers of FSDP2 that cannot be saved; save at the end of a window "
            "(after a step with result.boundary), or call engine.abort() first"
        )
    every = context.config.accumulation.every
    is_inside = any(one.is_open for one in context.prepared) or context.record.micro_step % every != 0
    return {
        "lanes": [_save_window_of(prepared, context.scalers) for prepared in context.prepared],
        "losses": {
            context.scalers.index(scaler): found_inf.clone()
            for scaler, found_inf in context.record.found_infs_to_save
        },
        **({"accumulate": every} if is_inside else {}),
        **({"rank": rank_and_count()} if context.holds_local_grads and is_multi_rank() else {}),
    }


def load_window(context: EngineContext, state: Mapping[str, Any]) -> None:
    """Restore what :func:`save_window` gave.

    Raises:
        StateError: it does not fit. Nothing was loaded.
    """
    check_window(context, state)
    # Optimizers whose gradients wait under the same scale must share one tensor.
    scales: dict[tuple[int, float], Tensor] = {}
    for prepared, saved in zip(context.prepared, state["lanes"], strict=True):
        _load_window_of(prepared, saved, context.scalers, scales, is_local="rank" in state)
    context.record.discard()
    for index, found_inf in state["losses"].items():
        found_inf = found_inf.to(context.device, torch.float32, copy=True)
        context.record.add_found_inf(context.scalers[index], found_inf)
        # A fused step that decides on the device reads here that a loss was not finite.
        context.record.add_nonfinite_loss(context.scalers[index], found_inf * (found_inf == NONFINITE_LOSS))
    found = any(bool(found_inf) for found_inf in state["losses"].values())
    for prepared in context.prepared:
        window = prepared.window
        if isinstance(window, Unscaled):
            prepared.window = window._replace(is_edited=bool(window.found_inf) != found)
    every, record = context.config.accumulation.every, context.record
    if state.get("accumulate") != every and not any(one.is_open for one in context.prepared):
        # Saved between two windows, maybe of another length: the next pass begins one.
        record.micro_step -= record.micro_step % every


def _save_window_of(prepared: PreparedOptimizer, scalers: Sequence[LossScaler]) -> dict[str, Any]:
    prepared.unscale_pending()
    _check_edits(prepared)
    window = prepared.window
    if isinstance(window, Unscaled) and not window.snapshot.unchanged() and not prepared.main_grads():
        # User code has dropped the gradients, and with them their overflow; here the next pass or step notices.
        window = Empty(torch.zeros_like(window.found_inf))
    # Indices count all parameters of the groups, because inside the window some may freeze, or join with gradients.
    own = set(map(id, prepared.pairs_now().model_params))
    pairs = [(i, pair) for i, pair in enumerate(prepared.table().all_pairs) if id(pair.model) in own]
    scaled = window if isinstance(window, Scaled) else None
    grads = _save_grads(prepared, pairs, scaled)
    return {
        "phase": "CLEAN" if isinstance(window, Empty) else "UNSCALED" if scaled is None else "SCALED",
        "found_inf": window.found_inf.clone(),
        "frozen": None if scaled is None else (scalers.index(scaled.scaler), scaled.scale.clone()),
        **grads,
        # Reveals missing gradients: a distributed checkpoint is read only into tensors that exist already.
        **({} if isinstance(window, Empty) else {"num_grads": sum(map(len, grads.values()))}),
    }


def _check_edits(prepared: PreparedOptimizer) -> None:
    """Refuse edits that a loaded window could not detect: of scaled gradients, or gradients of low-precision parameters.

    Raises:
        OrderError: user code made such an edit.
    """
    before = prepared.window
    prepared.remove_sentinel()
    window = prepared.window
    if isinstance(window, Unscaled):
        prepared.window = window.with_sentinel_of(before)
    elif isinstance(window, Scaled) and isinstance(before, Scaled) and before.detects_edits:
        prepared.set_window(window)


def _save_grads(
    prepared: PreparedOptimizer, pairs: Sequence[tuple[int, ParamPair]], scaled: Scaled | None
) -> dict[str, dict[int, Tensor]]:
    sentinel = None if scaled is None or scaled.sentinel is None else scaled.sentinel.holder
    sums = {} if scaled is None else scaled.sums
    return {
        "true_sized": {
            # Float32, because a parameter that joined inside the window gets its master when the window is loaded.
            i: pair.main.grad.float() if prepared.masters.waits_for_master(pair.model) else pair.main.grad
            for i, pair in pairs
            if prepared.is_open
            and pair.main.grad is not None
            and pair.main is not sentinel
            # The gradient of a parameter without a master waits scaled, and belongs to "scaled".
            and (scaled is None or pair.model is not pair.main)
        },
        "scaled": {
            i: sums.get(id(pair.model), pair.model.grad)
            for i, pair in pairs
            if scaled is not None
            and pair.model.grad is not None
            # Where nothing waits scaled, a stashed gradient stands in its place.
            and pair.model.grad is not scaled.stashed.get(id(pair.model))
        },
        "parked": {
            i: scaled.stashed[id(pair.model)]
            for i, pair in pairs
            if scaled is not None and id(pair.model) in scaled.stashed
        },
    }


def _load_window_of(
    prepared: PreparedOptimizer,
    saved: Mapping[str, Any],
    scalers: Sequence[LossScaler],
    scales: dict[tuple[int, float], Tensor],
    *,
    is_local: bool,
) -> None:
    prepared.drop()
    table = prepared.table()
    # A parameter that froze inside the window keeps its gradient, which lies on its master or is stashed.
    holding = sorted({*saved["true_sized"], *saved["scaled"], *saved["parked"]})
    trained = {id(table.all_pairs[index].model) for index in holding}
    prepared.masters.adopt(prepared.optimizer, trained=trained)
    table = prepared.table()
    for index, grad in saved["true_sized"].items():
        main = table.all_pairs[index].main
        main.grad = grad.detach().to(main.device, copy=True)
    sums: dict[int, Tensor] = {}
    for index, grad in saved["scaled"].items():
        model = table.all_pairs[index].model
        model.grad = grad.detach().to(model.device, model.dtype, copy=True)
        if grad.dtype != model.dtype:
            sums[id(model)] = grad.detach().to(model.device, copy=True)
    stashed: dict[int, Tensor] = {}
    for index, grad in saved["parked"].items():
        model = table.all_pairs[index].model
        stashed[id(model)] = grad.detach().to(model.device, copy=True)
    found_inf = saved["found_inf"].to(prepared.found_inf.device, torch.float32, copy=True)
    pairs = table.pairs_with_frozen(ParamPairs(table.all_pairs[index] for index in holding), stashed)
    if saved["phase"] == "UNSCALED":
        prepared.set_window(Unscaled(found_inf, pairs, GradSnapshot.of_present(pairs.main_params)))
    elif saved["phase"] == "SCALED":
        index, scale = saved["frozen"]
        scale = scales.setdefault((index, float(scale)), scale.to(found_inf.device, torch.float32, copy=True))
        scaler = scalers[index]
        prepared.set_window(
            after_delayed_backward(Empty(found_inf), pairs, scaler, scale, stashed, sums, is_local=is_local)
        )
    else:
        prepared.window = Empty(found_inf)
