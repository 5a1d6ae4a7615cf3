"""The one decider: from what is known of a step's gradients to whether it is taken, and everything as it is afterwards.

Pure: nothing is changed here, and nothing waits. What the host knows is decided in Python numbers, anything else in tensors; an
accelerator with Triton decides in one kernel (``ops/triton/decide.py``). All three read the rule of :mod:`halfpeak.core.rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.core.rule import found_of_loss, moves
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance_values, on_host, pick
from halfpeak.core.torch_compat import host_values, single


class LossFacts(NamedTuple):
    """What is known of one loss before a step is decided.

    Attributes:
        config: the rule of its scale.
        state: its scale now.
        first: its scale in the first of its passes; a smaller one now has answered their overflow already.  # f32[]
        found: what its passes have found: 0, 1 after an overflow, 0.5 if the loss itself was not finite; -1 if no rank has
            used it, so that its scale stays.  # f32[]
        owned: whether it is a loss of whoever steps; another engine's loss may have reached these parameters.
        counts: whether a clean window counts for it; false where its scale has moved since its passes.
    """

    config: ScaleConfig
    state: ScaleState
    first: Tensor
    found: Tensor
    owned: bool = True
    counts: bool = True


class Decision(NamedTuple):
    """Whether to step, and everything as it is afterwards.

    Attributes:
        skip: a bool if the host knows, else a flag for kernels that skip by themselves.  # f32[] or bool
        coef: the factor that clips the gradients; 1 without a limit.                     # f32[] or float
        states: of the losses, in the order given.
        num_steps: steps taken, this one included.      # i32[]
        num_skipped: steps skipped, this one included.  # i32[]
    """

    skip: Tensor | bool
    coef: Tensor | float
    states: list[ScaleState]
    num_steps: Tensor
    num_skipped: Tensor


_ZERO: Final = torch.zeros((), dtype=torch.int32, device="cpu")


def decide(
    found: Tensor,
    losses: Sequence[LossFacts],
    *,
    norm: Tensor | None = None,
    max_norm: float | None = None,
    counters: tuple[Tensor, Tensor] = (_ZERO, _ZERO),
) -> Decision:
    """Decide a step.

    ::

        skip    a gradient is not finite, a pass has found one, or the norm is not finite
        coef    min(1, max_norm / (norm + 1e-6))
        states  a skip lowers the scales of the losses whose passes have found an overflow; of all own losses, if none has.
                A clean step counts for the losses of its passes
        counts  one step more, taken or skipped

    Args:
        found: not 0 if a gradient that would be stepped is not finite.  # f32[]
        losses: those whose passes have left something in these gradients.
        norm: of all gradients together; None if nobody needs it.        # f32[]
        max_norm: the largest norm; None does not clip.
        counters: steps taken and steps skipped so far.                  # i32[], i32[]

    >>> from halfpeak.core.schedule import ScaleConfig
    >>> config, zero, count = ScaleConfig(init=8.0), torch.zeros(()), torch.zeros((), dtype=torch.int32)
    >>> loss = LossFacts(config, config.start(), torch.tensor(8.0), torch.ones(()))
    >>> decided = decide(zero, [loss], counters=(count, count))
    >>> decided.skip, decided.states[0].scale, decided.num_skipped
    (True, tensor(4.), tensor(1, dtype=torch.int32))
    """
    given = [found, *counters] if norm is None else [found, *counters, norm]
    known = host_values(*given, *(one for loss in losses for one in (*loss.state, loss.first, loss.found)))
    if known is None:
        return _decide_tensors(found, losses, norm, max_norm, counters)
    was_found, steps, skips = known[:3]
    number, rest = (None, known[3:]) if norm is None else (known[3], known[4:])
    of_losses = [rest[k : k + 6] for k in range(0, len(rest), 6)]
    skip = (
        bool(was_found)
        or any(one[5] > 0 for one in of_losses)
        or not (number is None or math.isfinite(number))
    )
    explained = max((one[5] for one in of_losses), default=0.0)
    states = [
        on_host(loss.state, one[:4], _after(loss, one[:4], one[4], one[5], skip, explained, pick))
        for loss, one in zip(losses, of_losses, strict=True)
    ]
    return Decision(
        skip,
        1.0 if max_norm is None or number is None else clip_coef_of_number(number, max_norm),
        states,
        counters[0] if skip else torch.scalar_tensor(steps + 1, dtype=torch.int32, device="cpu"),
        torch.scalar_tensor(skips + 1, dtype=torch.int32, device="cpu") if skip else counters[1],
    )


def _decide_tensors(
    found: Tensor,
    losses: Sequence[LossFacts],
    norm: Tensor | None,
    max_norm: float | None,
    counters: tuple[Tensor, Tensor],
) -> Decision:
    device = found.device
    zero = torch.zeros_like(found)
    explained = reduce(torch.maximum, (loss.found.to(device) for loss in losses), zero)
    skip = (found != 0) | (explained > 0)
    if norm is not None:
        skip = skip | ~torch.isfinite(norm.to(device))
    states: list[ScaleState] = []
    for loss in losses:
        home = loss.state.scale.device
        after = _after(
            loss,
            loss.state,
            loss.first.to(home),
            loss.found.to(home),
            skip.to(home),
            explained.to(home),
            torch.where,
        )
        states.append(ScaleState(*after))
    skipped = skip.to(counters[0].device, torch.int32)
    return Decision(
        skip.to(torch.float32),
        1.0 if max_norm is None or norm is None else clip_coef(norm, max_norm),
        states,
        counters[0] + (1 - skipped),
        counters[1] + skipped,
    )


def _after(
    loss: LossFacts, state: Any, first: Any, noted: Any, skip: Any, explained: Any, where: Callable[..., Any]
) -> Sequence[Any]:
    """The state of a loss scale after a step, as numbers or as tensors."""
    found = found_of_loss(skip, explained, where(noted > 0, noted, noted * 0), loss.owned, where)
    moved = advance_values(loss.config, state, found, where=where)
    move = moves(found, state[0], first, loss.counts) & (noted >= 0)
    return [where(move, new, old) for new, old in zip(moved, state, strict=True)]


def clip_coef(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``: the factor that scales gradients of this norm to at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` computes it. Every other place that does is tested against this one:
    :func:`clip_coef_of_number` in plain numbers, and kernels on the device.

    >>> clip_coef(torch.tensor(4.0), 1.0)
    tensor(0.2500)
    """  # f32[]
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_coef_of_number(norm: float, max_norm: float) -> float:
    """:func:`clip_coef` of a norm that the host knows, in every bit: four operations on a scalar tensor take longer.

    >>> round(clip_coef_of_number(4.0, 1.0), 6)
    0.25
    """
    # As torch divides a number by a tensor: the tensor's reciprocal times the number.
    return min(single(single(1 / single(norm + single(1e-6))) * single(max_norm)), 1.0)
