"""``scale_loss``: backward passes under a loss scale; ``master_params`` and ``last_step`` of an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.amp.ambient import casts_in_backward
from halfpeak.amp.run import Run
from halfpeak.amp.session import _amp_state
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.parts import loss_scaler
from halfpeak.parts.found_inf import is_multi_rank
from halfpeak.parts.parts import Parts
from halfpeak.parts.remainder_store import remainder_store_of
from halfpeak.parts.scaled_pass import ScaledPass
from halfpeak.parts.window import Window


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
    ``optimizer.step()`` of each of ``optimizers`` is skipped and a line is printed; as in apex also if the gradients are
    zeroed or dropped before it. If the body raises, gradients and scale are as they were before it.

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
    scaler = loss_scaler.scaler_of(run.scalers, loss_id, "amp.initialize")
    windows = [each.parts.window_of(optimizer) for optimizer, each in runs.items()]
    by_hand = [
        window for window, each in zip(windows, runs.values(), strict=True) if _is_reduced_by_hand(each.parts)
    ]
    scaled_pass = ScaledPass(run.parts, loss, scaler.part, by_hand=by_hand if delay_unscale else ())
    try:
        with casts_in_backward(run), scaled_pass:
            passes: list[Tensor] = []
            if scaled_pass.loss.requires_grad:
                scaled_pass.loss.register_hook(passes.append)
            yield scaled_pass.loss
            if scaled_pass.loss.requires_grad and not passes:
                warnings.warn(_NO_PASS, RuntimeWarning, stacklevel=3)
            if not delay_unscale:
                _take_as_reduced(by_hand)
    finally:
        if run.casts is not None:
            run.casts.clear_cache()
    for each in runs.values():
        each.loss_ids[scaler.part] = loss_id % len(run.scalers)
    if any(window.held is not None for window in windows):
        return  # the block that reduces these gradients counts for this loss, too
    found = {scaler.part: torch.zeros_like(scaler.found_inf)}
    for window in windows:
        for part, found_inf in scaled_pass.learned[window].items():
            found[part] = torch.maximum(found.get(part, found_inf), found_inf)
    views = {view.part: view for each in runs.values() for view in each.scalers}
    for part, found_inf in found.items():
        for window in windows:
            if not window.is_empty():
                window.note_until_step(part, found_inf)
        if part in views:
            views[part].take(found_inf, delay=delay_unscale or delay_overflow_check)


_NO_PASS: Final = (
    "no backward pass of the scaled loss ran in this scale_loss block; gradients of any other pass in it are divided by the "
    "loss scale all the same; write `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
)


def _is_reduced_by_hand(parts: Parts) -> bool:
    """Whether nobody but the script can reduce gradients over the ranks: with DistributedDataParallel ``no_sync`` tells."""
    return is_multi_rank() and not parts.has_shards and not parts.reduces


def _take_as_reduced(by_hand: Iterable[Window]) -> None:
    """Take what the script has left in ``.grad`` of earlier passes: ``all_reduce(p.grad.data)`` changes no version counter."""
    for window in by_hand:
        if window.held is not None:
            torch.autograd.graph.increment_version(window.gradients())


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
    run = _amp_state.run_of(optimizer)
    result = None if run is None else run.results.get(run.parts.window_of(optimizer))
    if result is None:
        raise OrderError(
            "this optimizer has not stepped under amp yet; call amp.initialize, then optimizer.step()"
        )
    return result


def _run_of(optimizer: Any) -> Run | None:
    run = _amp_state.run_of(optimizer)
    if run is None and _amp_state.require_started().enabled and not _amp_state.is_disabled(optimizer):
        raise OrderError(
            f"this {type(optimizer).__name__} was not passed to amp.initialize; write "
            "model, optimizer = amp.initialize(model, optimizer)"
        )
    return run
