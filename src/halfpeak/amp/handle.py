"""``scale_loss``: backward passes under a loss scale; ``master_params``: the tensors that an optimizer steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfpeak.amp.ambient import casts_in_backward
from halfpeak.amp.session import Run, _amp_state
from halfpeak.core.errors import OrderError
from halfpeak.engine.step_hooks import prepared_of
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
    """Yield the loss times its scale, for ``scaled_loss.backward()`` in the body.

    When the body ends, the gradients are unscaled and added to the ``.grad`` that the optimizers read: that of each
    parameter or of its master (``amp.master_params(optimizer)``). The loss scale is updated. If a gradient is not
    finite, the next ``optimizer.step()`` of each of ``optimizers`` is skipped and a line is printed.

    If the body raises, gradients and scale are as they were before it.

    Args:
        loss: any shape; it is upcast to float32 before it is multiplied.
        optimizers: every optimizer whose parameters get gradients in the body: one, or any iterable of optimizers.
        loss_id: which of the ``num_losses`` scalers to use; negative numbers count from the end.
        model: ignored, as in apex.
        delay_unscale: leave the gradients scaled; a later block without ``delay_unscale`` unscales the sum. This lets
            several backward passes share one reduction over the ranks.
        delay_overflow_check: unscale the gradients, and let an overflow skip the next ``optimizer.step()``, but leave
            the scale alone: the next block of this ``loss_id`` updates it once for both blocks.

    Raises:
        ConfigError: ``initialize`` was not called.
        OrderError: an optimizer was not passed to ``initialize``, or another loss scale scaled gradients of the window.
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
        if prepared_of(optimizer) is None:
            raise OrderError(
                f"this {type(optimizer).__name__} is no longer prepared, because its engine was removed after "
                "amp.initialize; call amp.initialize again, with a float32 model"
            )

    def record(part: LossScaler, found_inf: Tensor, reached: Sequence[tuple[Any, Tensor]]) -> None:
        scaler = run.scalers[run.engine.scalers.index(part)]
        number = loss_id % len(run.scalers)
        for optimizer, own in [*((optimizer, found_inf) for optimizer, _ in active), *reached]:
            found = _amp_state.overflows_of(optimizer)
            _, so_far = found.get(scaler, (number, own))
            found[scaler] = number, torch.maximum(so_far, own)
        # Last, because an exception above drops the block, and a dropped block must not move the scale.
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
            "float32 values in model.state_dict(), clip with halfpeak.prepare(..., clip=...), or make the optimizer without "
            "master="
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
