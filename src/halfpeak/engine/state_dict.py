"""Saves and loads the state of an engine as plain data, for a bitwise resume between any two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import renamed, row_of, state_dtypes
from halfpeak.core.state_checks import ENGINE_VERSION, copied
from halfpeak.distributed.optimizer_state import with_initial_moments
from halfpeak.engine.state_checks import check_loop_state, check_state, numbered_state
from halfpeak.engine.step import Step
from halfpeak.ops.shards import has_process_group
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.parts import Parts
from halfpeak.parts.window import Noted, Window


def save_state(run: Step) -> dict[str, Any]:
    """The state, as tensors and plain values. Tensors are live, as in torch: save or copy them before the next step.

    A distributed checkpoint is read into the tensors of a state, by key. So with a process group, parameters that were
    never stepped have moments, too, and optimizer state is keyed by parameter name.

    Raises:
        OrderError: see :func:`save_window`.
        StateError: the state dict of an optimizer is not of torch's form.
    """
    parts = run.parts
    windows = save_windows(run)
    if has_process_group():
        optimizers = [
            renamed(state, dict(enumerate(parts.names_of(window))))
            for window, state in zip(parts.windows, optimizer_states(run.parts.optimizers), strict=True)
        ]
    else:
        optimizers = [_state_of(optimizer) for optimizer in run.parts.optimizers]
    return {
        "version": ENGINE_VERSION,
        "level": run.config.properties.opt_level,
        "models": [model.state_dict() for model in run.parts.models],
        "parameters": [_untold(parts, window) for window in parts.windows],
        "optimizers": optimizers,
        # torch.distributed.checkpoint loads only what the loading run has, too, and casts it to the dtype that it has there.
        "state_dtypes": [state_dtypes(state) for state in optimizers],
        "scalers": [scaler.state_dict() for scaler in run.scalers],
        "counters": run.counters.state_dict(),
        "buffers": parts.stats.saved(),
        "window": windows,
    }


def _untold(parts: Parts, window: Window) -> dict[int, Tensor]:
    """By number, what an optimizer steps and the models' states do not tell: parameters of no model, and some masters."""
    of_models = {id(parameter) for model in parts.models for parameter in model.parameters()}
    return {
        i: main.detach()
        for i, (weight, main) in enumerate(zip(window.weights, window.mains, strict=True))
        if id(weight) not in of_models or parts.pairs.is_past_its_weight(weight)
    }


def optimizer_states(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The states of the optimizers, with moments also for parameters that were never stepped."""
    return [with_initial_moments(optimizer, _state_of(optimizer)) for optimizer in optimizers]


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


def load_state(run: Step, state: Mapping[str, Any]) -> None:
    """Restore what :func:`save_state` gave. Everything is checked before anything is loaded.

    Raises:
        StateError: the state does not fit the engine. Nothing was loaded.
    """
    parts = run.parts
    parts.agree()
    check_state(run, state)
    scales = [scaler.parse(saved) for scaler, saved in zip(run.scalers, state["scalers"], strict=True)]
    # torch keeps the tensors it is given: without a copy, later steps would write into the caller's state.
    optimizers = [
        copied(numbered_state(parts, window, saved), "an optimizer's state")
        for window, saved in zip(parts.windows, state["optimizers"], strict=True)
    ]
    for window in parts.windows:
        window.drop()
    for model, saved in zip(run.parts.models, state["models"], strict=True):
        model.load_state_dict(saved)
    parts.pairs.agree()
    for window, values in zip(parts.windows, state["parameters"], strict=True):
        for index, value in values.items():
            parts.pairs.load_main(window.weights[index], value)
    for optimizer, saved in zip(run.parts.optimizers, optimizers, strict=True):
        optimizer.load_state_dict(saved)
        _keep_scalars_wide(optimizer, saved)
    parts.stats.restore_saved(state["buffers"], is_loaded=True)
    _load_run(run, state, scales)
    load_windows(run, state["window"])


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


def save_loop_state(run: Step, *, window: bool) -> dict[str, Any]:
    """The state without models and optimizers, and without the open window if ``window`` is False."""
    return {
        "version": ENGINE_VERSION,
        "level": run.config.properties.opt_level,
        "scalers": [scaler.state_dict() for scaler in run.scalers],
        "counters": run.counters.state_dict(),
        "window": save_windows(run) if window else None,
        # Between two windows a skipped step restores what the model itself holds.
        "buffers": run.parts.stats.saved() if window and run.parts.has_gradients() else [],
    }


def load_loop_state(run: Step, state: Mapping[str, Any]) -> None:
    """Restore what :func:`save_loop_state` gave. A saved window of None changes nothing.

    Raises:
        StateError: the state does not fit. Nothing was loaded.
    """
    run.parts.agree()
    check_loop_state(run, state)
    scales = [scaler.parse(saved) for scaler, saved in zip(run.scalers, state["scalers"], strict=True)]
    _load_run(run, state, scales)
    if state["window"] is not None:
        load_windows(run, state["window"])
        run.parts.stats.restore_saved(state["buffers"])


def _load_run(run: Step, state: Mapping[str, Any], scales: Sequence[Any]) -> None:
    for scaler, scale in zip(run.scalers, scales, strict=True):
        scaler.state = scale
    run.counters.load_state_dict(state["counters"])
    run.report.poll()


def save_windows(run: Step) -> dict[str, Any]:
    """The open windows: gradients by the number of their parameter, and what their passes have found.

    Raises:
        OrderError: gradients are not reduced over the ranks yet, or were written while they were scaled.
    """
    parts, every = run.parts, run.config.accumulation.every
    parts.agree(to_weights=False)
    for window in parts.windows:
        window.unscale(", save after a step with result.boundary, or call engine.abort() first")
    numbers = {scaler: i for i, scaler in enumerate(run.scalers)}
    is_open = parts.has_gradients() or any(window.losses for window in parts.windows)
    return {
        "gradients": [
            {i: weight.grad for i, weight in enumerate(window.weights) if weight.grad is not None}
            for window in parts.windows
        ],
        "num_gradients": [len(window.gradients()) for window in parts.windows],
        "losses": [
            {
                numbers.get(scaler, _OF_ANOTHER_ENGINE - i): [
                    noted.found.clone(),
                    noted.first.clone(),
                    torch.tensor(float(noted.counts)),
                ]
                for i, (scaler, noted) in enumerate(window.losses.items())
            }
            for window in parts.windows
        ],
        **({"accumulate": every} if is_open or run.counters.micro_step % every else {}),
    }


_OF_ANOTHER_ENGINE: Final = -1
"""Losses of other engines have negative numbers."""


def load_windows(run: Step, state: Mapping[str, Any]) -> None:
    """Restore what :func:`save_windows` gave."""
    parts = run.parts
    for window, grads, losses in zip(parts.windows, state["gradients"], state["losses"], strict=True):
        window.drop()
        for index, grad in grads.items():
            weight = window.weights[index]
            weight.grad = grad.detach().to(weight.device, window.dtypes[index], copy=True)
        window.agree()
        for index, saved in losses.items():
            # Nobody lowers the scale of another engine's loss for this one, but it explains why a step is skipped.
            scaler = run.scalers[index] if index >= 0 else LossScaler(run.config.scale, parts.device)
            found, first, counts = (one.to(parts.device, torch.float32, copy=True) for one in saved)
            window.losses[scaler] = Noted(found, first, bool(counts))
    every, counters = run.config.accumulation.every, run.counters
    if state.get("accumulate") != every and not parts.has_gradients():
        # Saved between two windows, maybe of another length: the next pass begins one.
        counters.micro_step -= counters.micro_step % every
