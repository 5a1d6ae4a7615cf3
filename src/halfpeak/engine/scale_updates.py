"""How a step moves the loss scales: which losses have overflowed in it, and the next state of each scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from halfpeak.core.schedule import ScaleState, advance
from halfpeak.core.torch_compat import host_values
from halfpeak.state.loss_scaler import LossScaler
from halfpeak.state.stepped_params import SteppedParams


def found_of_losses(
    found_inf: Tensor, stepped: Sequence[SteppedParams], used: Iterable[LossScaler]
) -> tuple[dict[LossScaler, Tensor], dict[LossScaler, Tensor]]:
    """``found_inf`` of each loss: of the engine's own, and of other losses whose overflow made this step skip.

    If no pass explains a skip (the norm overflowed, or user code wrote an inf), all losses used are to blame.

    Args:
        found_inf: of the step.  # f32[]
        stepped: its optimizers.
        used: the engine's own losses since its last step.
    """
    own: dict[LossScaler, list[Tensor]] = {scaler: [] for scaler in used}
    others: dict[LossScaler, list[Tensor]] = {}
    for params in stepped:
        for scaler, found in params.losses.items():
            (own if scaler in own else others).setdefault(scaler, []).append(
                found.found_inf.to(found_inf.device)
            )
    every = [found for founds in (*own.values(), *others.values()) for found in founds]
    known = host_values(found_inf)
    if (known is not None and not known[0]) or not every:
        return dict.fromkeys(own, found_inf), {}
    explained = reduce(torch.maximum, every) > 0
    unexplained = torch.where(explained, 0, found_inf)
    return (
        {s: torch.maximum(found_inf * _max(founds, found_inf), unexplained) for s, founds in own.items()},
        {s: found_inf * _max(founds, found_inf) for s, founds in others.items()},
    )


def _max(founds: list[Tensor], like: Tensor) -> Tensor:
    return reduce(torch.maximum, founds) if founds else torch.zeros_like(like)


def advanced(
    scaler: LossScaler, found_inf: Tensor, stepped: Sequence[SteppedParams], *, counts: bool
) -> ScaleState:
    """The next state of a loss scaler.

    Args:
        found_inf: of its loss; less than 0 if no rank has used it.  # f32[]
        stepped: the optimizers of the step. An overflow of a pass under a larger scale than the present one has lowered the
            scale already, in a step of other optimizers.
        counts: whether a finite loss counts as a clean update. It does once, in the first step after its passes.
    """
    state = scaler.state
    found_inf = found_inf.to(state.scale.device)
    moved = advance(scaler.config, state, found_inf)
    under = [params.losses[scaler].scale for params in stepped if scaler in params.losses]
    was_lowered = [state.scale < scale for scale in under if scale is not state.scale]
    known = host_values(found_inf)
    if counts and not was_lowered and known is not None and known[0] >= 0:
        return moved
    moves = found_inf >= 0 if counts else found_inf > 0
    for lowered in was_lowered:
        moves = moves & ~(lowered & (found_inf > 0))
    return ScaleState(*(torch.where(moves, new, old) for new, old in zip(moved, state, strict=True)))
