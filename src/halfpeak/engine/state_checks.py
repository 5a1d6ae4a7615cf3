"""Checks of a saved state before it is loaded into an engine. No function here changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import check_optimizer_state
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import (
    is_number,
    require_count,
    require_list,
    require_mapping,
    require_number,
    require_tensor,
)
from halfpeak.distributed.optimizer_state import has_moments, numbered, without_initial_moments
from halfpeak.engine.context import EngineContext
from halfpeak.engine.gradients.params import ParamPair
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.shards import local_of
from halfpeak.state.found_inf import rank_and_count

VERSION: Final = 1
_KEYS: Final = ("version", "level", "models", "optimizers", "scalers", "counters", "buffers", "window")
LOOP_KEYS: Final = ("level", "scalers", "counters", "window", "buffers")
_WINDOW_KEYS: Final = ("phase", "found_inf", "true_sized", "scaled", "frozen", "parked")
"""Names on disk, of version 1: ``lanes`` are the optimizers, ``phase`` is the kind of window (``CLEAN`` is empty),
``true_sized`` are unscaled gradients, ``parked`` stashed ones, and ``frozen`` is (index of the scaler, scale)."""

_GRADS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "CLEAN": (),
    "UNSCALED": ("true_sized",),
    "SCALED": ("true_sized", "scaled", "parked"),
}
"""The kinds of gradients that a window may contain, by its phase."""


def check_state(context: EngineContext, state: object) -> None:
    """Check a state for :func:`halfpeak.engine.state_dict.load_state`.

    Raises:
        StateError: the state does not fit.
    """
    known = require_mapping(state, "an engine's state", _KEYS)
    check_version(known["version"], VERSION)
    models = require_list(known["models"], "models", len(context.models))
    for model, saved in zip(context.models, models, strict=True):
        check_model(model, saved)
    optimizers = require_list(known["optimizers"], "optimizers", len(context.prepared))
    for prepared, saved in zip(context.prepared, optimizers, strict=True):
        check_optimizer(prepared.optimizer, numbered_state(context, prepared, saved))
    _check_run(context, known)
    if _is_filled_in_place(context.models, models):
        _check_moments(context.optimizers, optimizers, known["counters"]["taken"])
    check_window(context, known["window"])


def numbered_state(context: EngineContext, prepared: PreparedOptimizer, saved: object) -> dict[str, Any]:
    """Convert a saved optimizer state to the form that ``load_state_dict`` of the optimizer takes.

    Raises:
        StateError: it is no optimizer state, or its parameters have other names.
    """
    return without_initial_moments(numbered(saved, context.names_of(prepared)))


def check_loop_state(context: EngineContext, state: object) -> None:
    """Check a state for :func:`halfpeak.engine.state_dict.load_loop_state`.

    Raises:
        StateError: the state does not fit.
    """
    known = require_mapping(state, "the state of a level in a loop", LOOP_KEYS)
    _check_run(context, known)
    if known["window"] is not None:
        check_window(context, known["window"])


def _check_moments(optimizers: Sequence[Optimizer], saved: Sequence[Any], taken: int) -> None:
    """Check that after a step at least one optimizer has moments. A step need not have stepped all optimizers.

    Only for states that ``dcp.load`` fills: user code may have cleared the moments before another state was saved.

    Raises:
        StateError: no optimizer has moments, so the run would continue with moments of zero.
    """
    if taken and not any(state["state"] for state in saved) and all(map(has_moments, optimizers)):
        raise StateError(
            f"the state was saved after {taken} steps but has no optimizer moments; dcp.load fills only tensors that exist "
            "already: call torch.distributed.init_process_group before dcp.load"
        )


def _is_filled_in_place(models: Sequence[nn.Module], saved: Sequence[Any]) -> bool:
    """Whether a state has the tensors of the models themselves, as one that ``dcp.load`` has filled."""
    own, given = (
        local_of(value for part in parts for value in part.values() if isinstance(value, Tensor))
        for parts in ([model.state_dict() for model in models], saved)
    )
    addresses = {tensor.data_ptr() for tensor in own if tensor.numel()}
    return any(tensor.data_ptr() in addresses for tensor in given)


def check_version(value: object, version: int) -> None:
    """Check the version of a state.

    Raises:
        StateError: the version is not ``version``.
    """
    if not is_number(value) or value != version:
        raise StateError(
            f"state version {short_repr(value)} is not {version}; it was saved by another version of halfpeak"
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


def check_window(context: EngineContext, window: object) -> None:
    """Check a saved window for :func:`halfpeak.engine.state_dict.load_window`.

    Raises:
        StateError: the window does not fit.
    """
    known = dict(require_mapping(window, "the state's window"))
    rank, here = known.pop("rank", None), rank_and_count()
    saved_every, every = known.pop("accumulate", None), context.config.accumulation.every
    known = require_mapping(known, "the state's window", ("lanes", "losses"))
    if rank is not None and rank != here:
        raise StateError(
            f"the saved window has gradients that were not reduced, of [rank, number of ranks] {short_repr(rank)}, and this "
            f"is {here}; save at the end of a window, or one file on every rank"
        )
    windows = require_list(known["lanes"], "optimizers in its window", len(context.prepared))
    for prepared, saved in zip(context.prepared, windows, strict=True):
        _check_one_window(prepared, saved, len(context.scalers))
    saved_every = require_count(every if saved_every is None else saved_every, "the accumulate of the window")
    if saved_every != every and any(saved["phase"] != "CLEAN" for saved in windows):
        raise StateError(
            f"the state was saved inside a window of accumulate={saved_every}, and here accumulate={every}; load it with "
            f"accumulate={saved_every}, or save at the end of a window"
        )
    for index, found_inf in require_mapping(known["losses"], "the losses of the state's window").items():
        _require_loss(index, len(context.scalers))
        require_tensor(found_inf, "the found_inf of a loss", shape=())


def check_buffers(saved: object) -> None:
    """Check saved batch-norm statistics.

    Raises:
        StateError: they are no list of tensors. Sizes are not checked, because loading ignores tensors of another size.
    """
    for flat in require_list(saved, "saved statistics"):
        # The dtype is not fixed: counts of batches are integers.
        require_tensor(flat, "a saved statistic", like=flat if isinstance(flat, Tensor) else None)


def _check_run(context: EngineContext, known: Mapping[Any, Any]) -> None:
    """Check the entries that the state of an engine and the state of a loop have in common."""
    scalers = require_list(known["scalers"], "loss scales", len(context.scalers))
    for scaler, saved in zip(context.scalers, scalers, strict=True):
        scaler.parse(saved)
    context.record.parse(known["counters"])
    check_buffers(known["buffers"])


def _check_one_window(prepared: PreparedOptimizer, window: object, losses: int) -> None:
    saved = dict(require_mapping(window, "a window of the state"))
    num_grads = saved.pop("num_grads", None)
    saved = require_mapping(saved, "a window of the state", _WINDOW_KEYS)
    phase, scale = saved["phase"], saved["frozen"]
    if not isinstance(phase, str) or phase not in _GRADS_OF:
        raise StateError(
            f"unknown phase {short_repr(phase)} in the state's window; allowed: {', '.join(_GRADS_OF)}"
        )
    if (phase == "SCALED") != (scale is not None):
        raise StateError(
            f"the state's window is {phase} and its scale {short_repr(scale)}; only SCALED gradients have one"
        )
    require_tensor(saved["found_inf"], "found_inf", shape=())
    pairs = prepared.table().all_pairs
    for name in ("true_sized", "scaled", "parked"):
        grads = require_mapping(saved[name], f"the {name} gradients of the state's window")
        if grads and name not in _GRADS_OF[phase]:
            raise StateError(f"the state's window is {phase} and holds {name} gradients")
        for index, grad in grads.items():
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(pairs):
                raise StateError(
                    f"gradient {short_repr(index)} ({name}) of the state's window belongs to no parameter of the optimizer, "
                    f"which has {len(pairs)}"
                )
            _check_gradient(grad, f"gradient {index} ({name})", pairs[index], prepared, name == "scaled")
    held = sum(len(saved[name]) for name in ("true_sized", "scaled", "parked"))
    if num_grads is not None:
        require_count(num_grads, "the number of gradients of the state's window")
    saved_grads = max(held, 1) if num_grads is None else num_grads
    if phase != "CLEAN" and held != saved_grads:
        raise StateError(
            f"the state was saved inside a window with {saved_grads} gradients, but has {held}; dcp.load fills only tensors "
            "that exist already: save at the end of a window, or with torch.save"
        )
    if scale is not None:
        loss, value = require_list(scale, "parts of the scale of the state's window", 2)
        _require_loss(loss, losses)
        require_tensor(value, "the scale of the state's window", shape=())
        if not 0 < require_number(value, "the scale of the state's window") < float("inf"):
            raise StateError(
                f"the scale of the state's window must be finite and above zero, not {float(value)}"
            )


def _check_gradient(
    grad: object, what: str, pair: ParamPair, prepared: PreparedOptimizer, is_scaled: bool
) -> None:
    owner = pair.model if is_scaled else pair.main
    # The parameter gets its master when the window is loaded.
    late = prepared.masters.waits_for_master(pair.model)
    if is_scaled and (late or pair.model is not pair.main):
        # Sums of several passes are kept in float32.
        allowed = {owner.dtype, torch.float32}
    else:
        allowed = {torch.float32 if late else owner.dtype}
    if isinstance(grad, Tensor) and grad.layout is torch.sparse_coo and grad.shape == owner.shape:
        is_it = grad.dtype in allowed and grad.device.type != "meta"
    else:
        is_it = require_tensor(grad, what, like=owner).dtype in allowed
    if not is_it:
        kinds = " or ".join(sorted(map(str, allowed)))
        raise StateError(f"{what} is {short_repr(grad)} in the state; allowed: {kinds}")


def _require_loss(index: object, losses: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < losses:
        raise StateError(f"the state's window names loss {short_repr(index)} of {losses}")
