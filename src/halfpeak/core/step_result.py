"""StepResult: what a step did, as a value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class NonfiniteGrads(NamedTuple):
    """Which gradients of a skipped step were not finite.

    Attributes:
        names: the names of parameters, nearest to the loss first.
        flags: 1 where the gradient was not finite.  # f32[names]
    """

    names: tuple[str, ...]
    flags: Tensor


class StepResult(NamedTuple):
    """What a call of ``step`` did. The tensors stay on the device; reading one is the caller's choice, and waits.

    :class:`~halfpeak.insight.history.History` reads them without waiting, when they have arrived.

    Attributes:
        found_inf: 1 when a gradient was not finite and the step was skipped, else 0.  # f32[]
        scale: the loss scale that the next backward pass will use (of loss 0).        # f32[]
        grad_norm: norm of the unscaled gradients before clipping; None if it was not computed.  # f32[]
        boundary: False when the call only closed one of several accumulated backward passes.
        has_gradients: False when no parameter had a gradient, so that there was nothing to step.
        grads: what :meth:`nonfinite` reads; None if the host knows of no skip.
    """

    found_inf: Tensor
    scale: Tensor
    grad_norm: Tensor | None = None
    boundary: bool = True
    has_gradients: bool = True
    grads: NonfiniteGrads | None = None

    def stepped(self) -> bool:
        """Whether the optimizer moved. Waits for the device.

        >>> import torch
        >>> StepResult(torch.tensor(0.0), torch.tensor(65536.0)).stepped()
        True
        """
        return self.boundary and self.has_gradients and not bool(self.found_inf)

    def nonfinite(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients made the step skip, nearest to the loss first. Waits for the device.

        Recorded only when a step is skipped. Empty on an accelerator with an optimizer that takes ``found_inf`` itself, because
        the host does not wait to learn of the skip there. If a clip by norm comes before the host knows of the skip, a NaN
        spreads to all gradients, and all names are returned.

        >>> import torch
        >>> grads = NonfiniteGrads(("head.weight", "stem.weight"), torch.tensor([0.0, 1.0]))
        >>> StepResult(torch.tensor(1.0), torch.tensor(65536.0), grads=grads).nonfinite()
        ('stem.weight',)
        """
        if self.grads is None:
            return ()
        return tuple(
            name for name, flag in zip(self.grads.names, self.grads.flags.tolist(), strict=True) if flag
        )
