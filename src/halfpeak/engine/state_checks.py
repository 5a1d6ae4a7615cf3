"""Checks of a saved state before it is loaded into an engine. No function here changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import check_optimizer_state, state_dtypes
from halfpeak.core.short_repr import name_list, short_repr
from halfpeak.core.state_checks import (
    ENGINE_VERSION,
    is_number,
    require_count,
    require_list,
    require_mapping,
    require_tensor,
)
from halfpeak.distributed.optimizer_state import numbered, without_initial_moments
from halfpeak.engine.step import Step
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.parts.parts import Parts
from halfpeak.parts.window import Window

_KEYS: Final = (
    "version",
    "level",
    "models",
    "parameters",
    "optimizers",
    "state_dtypes",
    "scalers",
    "counters",
    "buffers",
    "window",
)
LOOP_KEYS: Final = ("version", "level", "scalers", "counters", "window", "buffers")
_WINDOW_KEYS: Final = ("gradients", "num_gradients", "losses")


def check_state(run: Step, state: object) -> None:
    """Check a state for :func:`halfpeak.engine.state_dict.load_state`.

    Raises:
        StateError: the state does not fit.
    """
    check_version(state)
    known, parts = require_mapping(state, "an engine's state", _KEYS), run.parts
    models = require_list(known["models"], "models", len(parts.models))
    for model, saved in zip(parts.models, models, strict=True):
        check_model(model, saved)
    tables = require_list(known["parameters"], "optimizers in its parameters", len(parts.windows))
    for window, saved in zip(parts.windows, tables, strict=True):
        for index, value in require_mapping(saved, "the parameters of the state").items():
            _require_index(index, len(window.mains), "a parameter of the state")
            require_tensor(value, f"parameter {index}", like=window.mains[index])
    optimizers = require_list(known["optimizers"], "optimizers", len(parts.windows))
    dtypes = require_list(known["state_dtypes"], "dtypes of optimizer states", len(parts.windows))
    for window, saved, written in zip(parts.windows, optimizers, dtypes, strict=True):
        check_optimizer(window.optimizer, numbered_state(parts, window, saved))
        _check_state_dtypes(state_dtypes(saved), written)
    _check_run(run, known)
    check_windows(run, known["window"])


def _check_state_dtypes(found: Sequence[str], written: object) -> None:
    """Compare the tensors of an optimizer's state with those that were saved, between which ``dcp.load`` may have been."""
    written = require_list(written, "dtypes of an optimizer's state")
    if not all(isinstance(one, str) for one in written):
        raise StateError(f"the dtypes of an optimizer's state must be strings, not {short_repr(written)}")
    if written and not found:
        raise StateError(
            f"the state was saved with {short_repr(written)} but has none of them; dcp.load fills only tensors that exist "
            "already: call torch.distributed.init_process_group before dcp.load"
        )
    # Remainders are in no distributed checkpoint: the values of the model tell them.
    if {one for one in {*found} ^ {*written} if not one.startswith(REMAINDER)}:
        raise StateError(
            f"the state of an optimizer was saved with {short_repr(written)} and has {short_repr(found)}; dcp.load casts what "
            "it reads to the dtypes of this optimizer: build it with the moments= and master= of the run that saved it"
        )


def numbered_state(parts: Parts, window: Window, saved: object) -> dict[str, Any]:
    """Convert a saved optimizer state to the form that ``load_state_dict`` of the optimizer takes.

    Raises:
        StateError: it is no optimizer state, or its parameters have other names.
    """
    return without_initial_moments(numbered(saved, parts.names_of(window)))


def check_loop_state(run: Step, state: object) -> None:
    """Check a state for :func:`halfpeak.engine.state_dict.load_loop_state`.

    Raises:
        StateError: the state does not fit.
    """
    check_version(state)
    known = require_mapping(state, "the state of a level in a loop", LOOP_KEYS)
    _check_run(run, known)
    if known["window"] is not None:
        check_windows(run, known["window"])


def check_version(state: object) -> None:
    """Check the version of a state.

    Raises:
        StateError: it is not the one that is read.
    """
    known = require_mapping(state, "an engine's state")
    if "version" not in known:
        raise StateError(
            f"this is no state of an engine: it has no version, and the keys {name_list(list(map(str, known)), 6)}; pass what "
            "engine.state_dict() gave, such as state['engine'] of a file that has it under that key"
        )
    version = known["version"]
    if not is_number(version) or version != ENGINE_VERSION:
        raise StateError(
            f"state version {short_repr(version)} is not {ENGINE_VERSION}; it was saved by another version of halfpeak"
        )


def check_model(model: nn.Module, saved: object) -> None:
    """Check a model's state before it is loaded, as strictly as ``load_state_dict(strict=True)`` is.

    Raises:
        StateError: a tensor is missing, unknown, or of another shape or kind; or it has no dense memory.
    """
    own = model.state_dict()
    given = require_mapping(saved, "a model's state", own)
    for key, value in own.items():
        if isinstance(value, Tensor):
            # A lazy module has no shape before its first forward pass.
            require_tensor(given[key], key, like=given[key] if is_lazy(value) else value)
    metadata = require_mapping(getattr(given, "_metadata", {}), "the metadata of a model's state")
    for part in metadata.values():
        version = require_mapping(part, "the metadata of a module").get("version")
        if version is not None:
            require_count(version, "the version of a module")


def check_optimizer(optimizer: Optimizer, saved: object) -> None:
    """Check an optimizer's state before it is loaded.

    Raises:
        StateError: its groups or tensors have other sizes, or a value is neither a tensor nor plain data.
    """
    if isinstance(optimizer, FusedOptimizer):
        optimizer.check_state(require_mapping(saved, "an optimizer's state"))
    else:
        check_optimizer_state(optimizer, saved)


def check_windows(run: Step, saved: object) -> None:
    """Check saved windows for :func:`halfpeak.engine.state_dict.load_windows`.

    Raises:
        StateError: they do not fit.
    """
    known = dict(require_mapping(saved, "the state's window"))
    every, windows = run.config.accumulation.every, run.parts.windows
    saved_every = require_count(known.pop("accumulate", every), "the accumulate of the window")
    known = require_mapping(known, "the state's window", _WINDOW_KEYS)
    gradients = require_list(known["gradients"], "optimizers in its window", len(windows))
    numbers = require_list(known["num_gradients"], "optimizers in its window", len(windows))
    for window, saved, number in zip(windows, gradients, numbers, strict=True):
        saved = require_mapping(saved, "the gradients of the state's window")
        if require_count(number, "the number of gradients") != len(saved):
            raise StateError(
                f"the state was saved inside a window with {number} gradients, but has {len(saved)} of them; load it with "
                "torch.load and engine.load_state_dict, or save at the end of a window"
            )
        check_gradients(saved, window.weights, window.dtypes)
    if saved_every != every and any(gradients):
        raise StateError(
            f"the state was saved inside a window of accumulate={saved_every}, and here accumulate={every}; load it with "
            f"accumulate={saved_every}, or save at the end of a window"
        )
    losses = len(run.scalers)
    for saved in require_list(known["losses"], "optimizers in its window", len(windows)):
        for index, found in require_mapping(saved, "the losses of the state's window").items():
            if isinstance(index, bool) or not isinstance(index, int) or index >= losses:
                raise StateError(
                    f"a loss of the state's window has the number {short_repr(index)}, and there are {losses}"
                )
            for one in require_list(found, "numbers of a loss", 3):
                require_tensor(one, "a number of a loss", shape=())


def check_buffers(saved: object) -> None:
    """Check saved batch-norm statistics.

    Raises:
        StateError: they are no list of tensors. Sizes are not checked, because loading ignores tensors of another size.
    """
    for flat in require_list(saved, "saved statistics"):
        # The dtype is not fixed: counts of batches are integers.
        require_tensor(flat, "a saved statistic", like=flat if isinstance(flat, Tensor) else None)


def check_gradients(
    saved: Mapping[Any, Any], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
) -> None:
    """Check saved gradients by the number of their weight; None for ``dtypes`` takes any floating dtype.

    Raises:
        StateError: they do not fit.
    """
    for index, grad in saved.items():
        _require_index(index, len(weights), "a gradient of the state's window")
        what, weight = f"gradient {index}", weights[index]
        if not (isinstance(grad, Tensor) and grad.layout is torch.sparse_coo and grad.shape == weight.shape):
            require_tensor(grad, what, like=weight)
        if grad.device.type == "meta" or not (dtypes is None or grad.dtype is dtypes[index]):
            raise StateError(
                f"{what} is {short_repr(grad)} in the state; allowed: {weight.dtype if dtypes is None else dtypes[index]}"
            )


def _check_run(run: Step, known: Mapping[Any, Any]) -> None:
    """Check the entries that the state of an engine and the state of a loop have in common."""
    scalers = require_list(known["scalers"], "loss scales", len(run.scalers))
    for scaler, saved in zip(run.scalers, scalers, strict=True):
        scaler.parse(saved)
    run.counters.parse(known["counters"])
    check_buffers(known["buffers"])


def _require_index(index: object, count: int, what: str) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise StateError(f"{what} has the number {short_repr(index)}, and there are {count}")
