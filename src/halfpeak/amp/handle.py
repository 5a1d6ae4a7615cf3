"""``scale_loss`` and ``master_params``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfpeak.amp.ambient import casts_in_backward
from halfpeak.amp.session import Run, _amp_state
from halfpeak.core.errors import OrderError
from halfpeak.engine.prepare import is_prepared
from halfpeak.state.loss_scaler import LossScaler
from halfpeak.state.remainder_store import remainder_store_of


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Generator[Tensor]:
    """The loss times its scale, for ``scaled_loss.backward()`` in the body.

    When the body ends, the gradients are unscaled and added to what the optimizers will read: the parameters' ``.grad``, or
    the masters' (``amp.master_params(optimizer)``). The loss scale is updated. If a gradient was not finite, the next
    ``optimizer.step()`` of each of ``optimizers`` is skipped and a line is printed.

    If the body raises, gradients and scale are as they were before it.

    Args:
        loss: any shape; it is upcast to float32 before it is multiplied.
        optimizers: every optimizer whose parameters get gradients in the body: one, or any iterable of them.
        loss_id: which of the ``num_losses`` scalers to use; negative numbers count from the end.
        model: ignored, as in apex.
        delay_unscale: leave the gradients scaled; a later block without it unscales the sum. For reducing gradients
            over ranks once per several backward passes.
        delay_overflow_check: unscale the gradients and remember an overflow for the coming ``optimizer.step()``, but
            count this block together with the next one of this ``loss_id`` when the scale moves.

    Raises:
        ConfigError: ``initialize`` was not called.
        OrderError: an optimizer was not passed to ``initialize``; or gradients of the window are scaled by another loss scale.
        LossIdError: ``loss_id`` is not below ``num_losses``.
    """
    _amp_state.require_started()
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    runs = [_run_of(optimizer) for optimizer in listed]
    active = [(optimizer, run) for optimizer, run in zip(listed, runs, strict=True) if run is not None]
    if not active:
        with casts_in_backward(None):
            yield loss
        return
    run = active[0][1]
    for optimizer, _ in active:
        if not is_prepared(optimizer):
            raise OrderError(f"the hooks of amp.initialize were taken off this {type(optimizer).__name__}")

    def record(part: LossScaler, found_inf: Tensor, reached: Sequence[tuple[Any, Tensor]]) -> None:
        scaler = run.scalers[run.engine.scalers.index(part)]
        number = loss_id % len(run.scalers)
        for optimizer, own in [*((optimizer, found_inf) for optimizer, _ in active), *reached]:
            found = _amp_state.overflows_of(optimizer)
            _, so_far = found.get(scaler, (number, own))
            found[scaler] = number, torch.maximum(so_far, own)
        # Last: an exception before this drops the block, which must not have been counted then.
        scaler.take(found_inf, delay=delay_overflow_check)

    try:
        with (
            casts_in_backward(run),
            run.engine.scaled(
                loss,
                optimizers=[optimizer for optimizer, _ in active],
                loss_id=loss_id,
                delay=delay_unscale,
                on_found_inf=record,
            ) as scaled,
        ):
            yield scaled
    finally:
        if run.casts is not None:
            run.casts.clear_cache()


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: float32 masters where there are some, else the parameters themselves.

    >>> parameters = [torch.nn.Parameter(torch.ones(1))]
    >>> len(list(master_params(torch.optim.SGD(parameters, lr=0.1))))
    1

    Raises:
        OrderError: the optimizer stores remainders of its weights, so there are no float32 masters to read or write.
    """
    if remainder_store_of(optimizer) is not None:
        raise OrderError(
            f"{type(optimizer).__name__} keeps remainders of its weights, and float32 masters lie nowhere; read their values "
            "in model.state_dict(), clip with halfpeak.prepare(..., clip=...), or make the optimizer without master="
        )
    for group in optimizer.param_groups:
        yield from group["params"]


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
