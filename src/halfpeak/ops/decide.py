"""``decide`` where its numbers are: on the host in Python, on an accelerator in one kernel, or in tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from halfpeak.core import decide as reference
from halfpeak.core.decide import Decision, LossFacts
from halfpeak.ops.triton import is_installed, kernels


def decide(
    found: Tensor,
    losses: Sequence[LossFacts],
    *,
    norm: Tensor | None = None,
    max_norm: float | None = None,
    counters: tuple[Tensor, Tensor],
) -> Decision:
    """As :func:`halfpeak.core.decide.decide`, which is the reference. Never waits."""
    device = found.device
    if device.type == "cuda" and is_installed():
        tensors = [*counters, *(one for loss in losses for one in (*loss.state, loss.found, loss.first))]
        if all(one.device == device for one in tensors) and (norm is None or norm.device == device):
            return kernels().decide(found, losses, norm, max_norm, counters)
    return reference.decide(found, losses, norm=norm, max_norm=max_norm, counters=counters)
