"""Schemas of a saved state, and checks of it before it is loaded into an engine. No function here changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import check_optimizer_state, state_dtypes
from halfpeak.core.schedule import SCALER_STATE
from halfpeak.core.short_repr import name_list, short_repr
from halfpeak.core.state_checks import (
    ENGINE_VERSION,
    NotRequired,
    Schema,
    is_number,
    require,
    require_count,
    require_mapping,
    require_tensor,
    unfit,
)
from halfpeak.distributed.optimizer_state import numbered, without_initial_moments
from halfpeak.engine.counters import COUNTERS
from halfpeak.engine.step import Step
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.parts.parts import Parts
from halfpeak.parts.window import Window

LOOP_KEYS: Final = ("version", "level", "scalers", "counters", "window", "buffers")

BUFFERS: Final[Schema] = [require_tensor, ...]
"""The schema of batch-norm statistics. Loading ignores tensors of another size, and counts of batches are integers."""


def check_state(run: Step, state: object) -> None:
    """Check a state for :func:`halfpeak.engine.state_dict.load_state`.

    Raises:
        StateError: the state does not fit.
    """
    _check_version(state)
    parts, windows = run.parts, run.parts.windows
    schema: Schema = {
        **_run_schema(run),
        "models": [partial(_require_model, model) for model in parts.models],
        "parameters": [_by_number(window.mains) for window in windows],
        "optimizers": [partial(_require_optimizer, parts, window) for window in windows],
        "state_dtypes": [[str, ...] for _ in windows],
        "window": partial(_require_windows, run),
    }
    known = require(state, "state", schema)
    for saved, written in zip(known["optimizers"], known["state_dtypes"], strict=True):
        _check_state_dtypes(state_dtypes(saved), written)


def check_loop_state(run: Step, state: object) -> None:
    """Check a state for :func:`halfpeak.engine.state_dict.load_loop_state`.

    Raises:
        StateError: the state does not fit.
    """
    is_closed = _check_version(state).get("window") is None
    require(
        state, "state", {**_run_schema(run), "window": ... if is_closed else partial(_require_windows, run)}
    )


def _run_schema(run: Step) -> dict[str, Schema]:
    """What the state of an engine and that of a loop have in common."""
    return {
        "version": ...,
        "level": ...,
        "scalers": [SCALER_STATE] * len(run.scalers),
        "counters": COUNTERS,
        "buffers": BUFFERS,
    }


def _by_number(schemas: Sequence[Schema]) -> Schema:
    """The schema of a dict that has some of the numbers of a list."""
    return {i: NotRequired(schema) for i, schema in enumerate(schemas)}


def gradients_schema(weights: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> Schema:
    """The schema of gradients by the number of their weight; a dtype of None is any floating dtype."""
    return _by_number(
        [partial(_require_gradient, weight, dtype) for weight, dtype in zip(weights, dtypes, strict=True)]
    )


def _require_gradient(weight: Tensor, dtype: torch.dtype | None, grad: Any, what: str) -> None:
    if not (isinstance(grad, Tensor) and grad.layout is torch.sparse_coo and grad.shape == weight.shape):
        require_tensor(grad, what, like=weight)
    if grad.device.type == "meta" or not (dtype is None or grad.dtype is dtype):
        raise unfit(grad, what, f"a {dtype or weight.dtype} tensor of {tuple(weight.shape)}")


def _require_windows(run: Step, saved: Any, what: str) -> None:
    every, windows = run.config.accumulation.every, run.parts.windows
    schema: Schema = {
        "gradients": [gradients_schema(window.weights, window.dtypes) for window in windows],
        "num_gradients": [require_count] * len(windows),
        "losses": [{object: [torch.zeros(())] * 3}] * len(windows),
        "accumulate": NotRequired(require_count),
    }
    require(saved, what, schema)
    for grads, number in zip(saved["gradients"], saved["num_gradients"], strict=True):
        if number != len(grads):
            raise StateError(
                f"the state was saved inside a window with {number} gradients, but has {len(grads)} of them; load it with "
                "torch.load and engine.load_state_dict, or save at the end of a window"
            )
    saved_every = saved.get("accumulate", every)
    if saved_every != every and any(saved["gradients"]):
        raise StateError(
            f"the state was saved inside a window of accumulate={saved_every}, and here accumulate={every}; load it with "
            f"accumulate={saved_every}, or save at the end of a window"
        )
    for index in (index for losses in saved["losses"] for index in losses):
        # Losses of other engines have negative numbers.
        if isinstance(index, bool) or not isinstance(index, int) or index >= len(run.scalers):
            raise unfit(
                index, f"a key of {what}['losses']", f"the number of one of {len(run.scalers)} losses"
            )


def _require_model(model: nn.Module, saved: Any, what: str) -> None:
    """As strict as ``load_state_dict(strict=True)``."""
    # A lazy module has no shape before its first forward pass.
    schema = {
        key: (require_tensor if is_lazy(value) else value) if isinstance(value, Tensor) else ...
        for key, value in model.state_dict().items()
    }
    metadata = getattr(require(saved, what, schema), "_metadata", {})
    for part in require(metadata, f"{what}._metadata", {object: Mapping}).values():
        if part.get("version") is not None:
            require_count(part["version"], f"the version of a module in {what}._metadata")


def _require_optimizer(parts: Parts, window: Window, saved: Any, what: str) -> None:
    check_optimizer(window.optimizer, numbered_state(parts, window, saved), what)


def numbered_state(parts: Parts, window: Window, saved: object) -> dict[str, Any]:
    """Convert a saved optimizer state to the form that ``load_state_dict`` of the optimizer takes.

    Raises:
        StateError: it is no optimizer state, or its parameters have other names.
    """
    return without_initial_moments(numbered(saved, parts.names_of(window)))


def check_optimizer(optimizer: Optimizer, saved: Any, what: str = "state") -> None:
    """Check an optimizer's state before it is loaded.

    Args:
        what: the state as an expression, for the message.

    Raises:
        StateError: its groups or tensors have other sizes, or a value is neither a tensor nor plain data.
    """
    check = (
        optimizer.check_state
        if isinstance(optimizer, FusedOptimizer)
        else partial(check_optimizer_state, optimizer)
    )
    check(saved, what)


def _check_state_dtypes(found: Sequence[str], written: Sequence[str]) -> None:
    """Compare the tensors of an optimizer's state with those that were saved, between which ``dcp.load`` may have been."""
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


def _check_version(state: Any) -> Mapping[Any, Any]:
    known = require_mapping(state, "state")
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
    return known
