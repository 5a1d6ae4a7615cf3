"""StepResult: what a step did, as a value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepResult(NamedTuple):
    """What a call of ``step`` did. The tensors stay on the device; reading one is the caller's choice, and waits.

    :class:`~halfpeak.insight.history.History` reads them without waiting, when they have arrived.

    Attributes:
        found_inf: 1 when a gradient was not finite and the step was skipped, else 0.  # f32[]
        scale: the loss scale that the next backward pass will use (of loss 0).        # f32[]
        grad_norm: norm of the true-sized gradients before clipping; None when nothing asked for it.  # f32[]
        boundary: False when the call only closed one of several accumulated backward passes.
        has_gradients: False when no parameter had a gradient, so that there was nothing to step.
    """

    found_inf: Tensor
    scale: Tensor
    grad_norm: Tensor | None = None
    boundary: bool = True
    has_gradients: bool = True

    def stepped(self) -> bool:
        """Whether the optimizer moved. Waits for the device.

        >>> import torch
        >>> StepResult(torch.tensor(0.0), torch.tensor(65536.0)).stepped()
        True
        """
        return self.boundary and self.has_gradients and not bool(self.found_inf)
