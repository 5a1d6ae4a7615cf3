"""``scale_loss``: backward passes under a loss scale; ``master_params`` and ``last_step`` of an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.amp.ambient import casts_in_backward
from halfpeak.amp.run import Run
from halfpeak.amp.scaler import LossScaler
from halfpeak.amp.session import _amp_state
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.engine.parts import Parts
from halfpeak.state import loss_scaler
from halfpeak.state.found_inf import is_multi_rank
from halfpeak.state.loss_scaler import is_unit
from halfpeak.state.pairs import Pairs
from halfpeak.state.remainder_store import remainder_store_of
from halfpeak.state.scaled_pass import ScaledPass
from halfpeak.state.stepped_params import SteppedParams


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Generator[Tensor]:
    """Yield the loss times its scale, for ``scaled_loss.backward()`` in the body.

    When the body ends, gradients are unscaled and added to ``.grad``, and the loss scale moves. If one is not finite, the next
    ``optimizer.step()`` of each of ``optimizers`` is skipped and a line is printed. If the body raises, gradients and scale
    are as they were before it.

    Args:
        loss: any shape; it is upcast to float32 before it is multiplied.
        optimizers: every optimizer whose parameters get gradients in the body: one, or any iterable of optimizers.
        loss_id: which of the ``num_losses`` scalers to use; negative numbers count from the end.
        model: ignored, as in apex.
        delay_unscale: leave the scale alone, and count an overflow in the next block of this ``loss_id`` that does not.
            Gradients are unscaled as always. On several ranks without ``DistributedDataParallel`` the next block without it
            begins with their scaled sum in ``.grad``, for the script to reduce.
        delay_overflow_check: leave the scale alone, and count an overflow in the next block of this ``loss_id``.

    Warns:
        RuntimeWarning: the body has run no backward pass of the scaled loss.

    Raises:
        ConfigError: ``initialize`` was not called.
        ConfigTypeError: a tensor is given as the optimizer.
        OrderError: an optimizer was not passed to ``initialize``, or another block is open.
        LossIdError: ``loss_id`` is not below ``num_losses``.
    """
    _amp_state.require_started()
    if isinstance(optimizers, Tensor):
        raise ConfigTypeError("scale_loss takes the loss first; write amp.scale_loss(loss, optimizer)")
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    runs = {optimizer: run for optimizer in listed if (run := _run_of(optimizer)) is not None}
    if not runs:  # amp is disabled
        with casts_in_backward(None):
            yield loss
        return
    run = next(iter(runs.values()))
    scaler = run.scaler(loss_id)
    stepped = [each.parts.pairs.params_of(optimizer) for optimizer, each in runs.items()]
    by_hand = [each.parts for each in runs.values() if _is_reduced_by_hand(each.parts)]
    block = ScaledPass(run.parts.pairs, loss, scaler.part, memory=run.parts.memory)
    try:
        with casts_in_backward(run), _no_sync(by_hand if delay_unscale else ()), block:
            waiting = _no_sync_losses(stepped)
            passes: list[Tensor] = []
            if block.loss.requires_grad:
                block.loss.register_hook(passes.append)
            yield block.loss
            if block.loss.requires_grad and not passes:
                warnings.warn(_NO_PASS, RuntimeWarning, stacklevel=3)
            for parts in by_hand:
                _take_as_reduced(parts.pairs)
            is_local = any(each.parts.pairs.local_ids() for each in runs.values())
    finally:
        if run.casts is not None:
            run.casts.clear_cache()
    found_inf = _found_inf(block, stepped, scaler)
    for each in runs.values():
        each.loss_ids[scaler.part] = loss_id % len(run.scalers)
    if is_local:  # the block that reduces these gradients counts for this loss, too
        return
    counted = {scaler.part, *(waiting - _no_sync_losses(stepped))}
    for one in {view for each in runs.values() for view in each.scalers if view.part in counted}:
        for params in stepped:
            _skip_with_all(params, one.part, found_inf)
        one.take(found_inf, delay=delay_unscale or delay_overflow_check)


_NO_PASS: Final = (
    "no backward pass of the scaled loss ran in this scale_loss block; gradients of any other pass in it are divided by the "
    "loss scale all the same; write `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
)


def _found_inf(block: ScaledPass, stepped: Iterable[SteppedParams], scaler: LossScaler) -> Tensor:
    """1 if a block has made a gradient of the listed optimizers that is not finite; one result for all of them.  # f32[]"""
    found_inf = torch.zeros_like(scaler.found_inf)
    for params in stepped:
        if params in block.found:
            found_inf = torch.maximum(found_inf, block.found[params])
        elif is_unit(scaler.part):  # the pass leaves gradients as they are, and does not look at them
            found_inf = torch.maximum(found_inf, params.found_inf(found_inf))
    return found_inf


def _no_sync_losses(stepped: Iterable[SteppedParams]) -> set[loss_scaler.LossScaler]:
    return {scaler for params in stepped for scaler in params.no_sync_losses}


def _skip_with_all(params: SteppedParams, scaler: loss_scaler.LossScaler, found_inf: Tensor) -> None:
    """Note the result of a block for the step of a listed optimizer, if it has gradients."""
    if params.gradients():
        params.note(scaler, found_inf, found_inf)
        # Any scale is below inf: the step sees that the loss scale has fallen since, or could not fall.
        params.losses[scaler] = params.losses[scaler]._replace(scale=torch.full_like(found_inf, inf))


def _is_reduced_by_hand(parts: Parts) -> bool:
    """Whether nobody but the script can reduce gradients over the ranks: with DistributedDataParallel ``no_sync`` tells."""
    sharded = any(params.has_shards for params in parts.pairs.optimizers)
    return is_multi_rank() and not sharded and not parts.pairs.reduces


@contextmanager
def _no_sync(by_hand: Iterable[Parts]) -> Generator[None]:
    """The pass in the body leaves gradients that are not reduced; the next pass begins with them, scaled, in ``.grad``."""
    try:
        for parts in by_hand:
            parts.pairs.reduces = dict.fromkeys(parts.models, False)
        yield
    finally:
        for parts in by_hand:
            parts.pairs.reduces = {}


def _take_as_reduced(pairs: Pairs) -> None:
    """Take what the script has left in ``.grad`` of earlier passes: ``all_reduce(p.grad.data)`` changes no version counter."""
    if pairs.no_sync_ids and not pairs.local_ids():
        weights = (weight for params in pairs.optimizers for weight in params.weights)
        grads = [w.grad for w in weights if id(w) in pairs.no_sync_ids and w.grad is not None]
        torch.autograd.graph.increment_version(grads)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that the optimizer steps: float32 masters, and parameters that have no master.

    >>> parameters = [torch.nn.Parameter(torch.ones(1))]
    >>> len(list(master_params(torch.optim.SGD(parameters, lr=0.1))))
    1

    Raises:
        OrderError: the optimizer stores remainders of its low-precision weights, so no float32 masters exist.
    """
    if remainder_store_of(optimizer) is not None:
        raise OrderError(
            f"{type(optimizer).__name__} stores remainders instead of float32 masters, so there are none to return; read "
            "float32 values in model.state_dict(), clip model.parameters(), or make the optimizer without master="
        )
    for group in optimizer.param_groups:
        yield from group["params"]


def last_step(optimizer: Optimizer) -> StepResult:
    """The result of the last ``optimizer.step()``: whether it was skipped, and the loss scale afterwards.

    For a learning-rate schedule that counts only real updates::

        optimizer.step()
        if amp.last_step(optimizer).stepped():
            scheduler.step()

    Raises:
        OrderError: the optimizer was not initialised, or has not stepped yet.
    """
    try:
        run = _amp_state.run_of(optimizer)
    except KeyError:
        run = None
    result = None if run is None else run.results.get(run.parts.pairs.params_of(optimizer))
    if result is None:
        raise OrderError(
            "this optimizer has not stepped under amp yet; call amp.initialize, then optimizer.step()"
        )
    return result


def _run_of(optimizer: Any) -> Run | None:
    try:
        return _amp_state.run_of(optimizer)
    except KeyError:
        if not _amp_state.require_started().enabled:
            return None
        raise OrderError(
            f"this {type(optimizer).__name__} was not passed to amp.initialize; write "
            "model, optimizer = amp.initialize(model, optimizer)"
        ) from None
