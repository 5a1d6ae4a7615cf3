"""Finding the loss scaler and the optimizers that a call names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from halfpeak.core.errors import LossIdError, OrderError
from halfpeak.engine.lane import Lane
from halfpeak.parts.loss_scaler import LossScaler


def find_scaler(scalers: Sequence[LossScaler], loss_id: int) -> LossScaler:
    """The loss scaler with that number; negative numbers count from the end.

    Raises:
        LossIdError: there is none.
    """
    if not -len(scalers) <= loss_id < len(scalers):
        raise LossIdError(
            f"loss_id={loss_id!r} with num_losses={len(scalers)}; write a loss_id below num_losses, or "
            f"prepare with num_losses={loss_id + 1 if loss_id >= 0 else -loss_id}"
        )
    return scalers[loss_id]


def find_lanes(lanes: list[Lane], optimizers: Iterable[Optimizer] | Optimizer | None) -> list[Lane]:
    """The lanes of the given optimizers, each once, in their order; None means all.

    Raises:
        OrderError: one of them was not prepared by this engine, or there is none.
    """
    if optimizers is None:
        if not lanes:
            raise OrderError("this engine was prepared without an optimizer; pass one to halfpeak.prepare")
        return lanes
    wanted = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    known = {id(lane.optimizer): lane for lane in lanes}
    for optimizer in wanted:
        if id(optimizer) not in known:
            raise OrderError(
                f"{type(optimizer).__name__} was not prepared by this engine; pass it to halfpeak.prepare"
            )
    return list({id(optimizer): known[id(optimizer)] for optimizer in wanted}.values())
