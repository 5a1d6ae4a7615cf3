"""UnscaledGrads: a gradient scaler's record of one optimizer's gradients, from unscaling to the next window."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.optimizer_state import params_of
from halfpeak.ops import foreach, reference


class UnscaledGrads:
    """The gradients of one optimizer from the moment they are divided by the scale until they are dropped.

    Args:
        inv_scale: the factor that unscales gradients.  # f32[]
        already: gradients that are unscaled already, because another optimizer shares them.

    Attributes:
        optimizer: the optimizer that has the gradients.
        grads: the gradients that were unscaled here, or already.
        found_inf: 1 if one of the gradients, or one that arrived since, was not finite, and the loss scale has not been
            updated with it yet.  # f32[]
        has_stepped: whether the optimizer has stepped with the gradients.
        is_counted: whether the loss scale has been updated with all of the gradients.
    """

    def __init__(self, optimizer: Optimizer, inv_scale: Tensor, already: Iterable[Tensor]) -> None:
        self.optimizer = optimizer
        self.grads = gradients(optimizer)
        self.found_inf = torch.zeros_like(inv_scale)
        self.has_stepped = False
        self.is_counted = False
        self._counted_inf: Tensor | None = None
        self._versions: list[int] = []
        done = {id(grad) for grad in already}
        with torch.no_grad():
            # A gradient that two optimizers share is unscaled once, and checked for both.
            foreach.check_([grad for grad in self.grads if id(grad) in done], self.found_inf)
            fresh = [grad for grad in self.grads if id(grad) not in done]
            foreach.unscale_(fresh, inv_scale, self.found_inf)

    def mark_counted(self) -> None:
        """Note that the loss scale was updated with ``found_inf``. Gradients that arrive later count anew."""
        found = self.found_inf
        self._counted_inf = found if self._counted_inf is None else torch.maximum(self._counted_inf, found)
        self.found_inf = torch.zeros_like(self.found_inf)
        self.is_counted = True

    def found_inf_at_step(self) -> Tensor:
        """Return 1 if a step must be skipped, else 0, as a new tensor.  # f32[]"""
        if self._counted_inf is None:
            return self.found_inf.clone()
        # update() came before step(). Gradients that were zeroed in between have no overflow any more.
        still = torch.zeros_like(self.found_inf)
        foreach.check_(gradients(self.optimizer), still)
        self._counted_inf = torch.minimum(self._counted_inf, still)
        return torch.maximum(self._counted_inf, self.found_inf)

    def mark_stepped(self) -> None:
        """Note that the optimizer has stepped with the gradients that it has now."""
        self.has_stepped = True
        self.grads = gradients(self.optimizer)
        self._versions = [grad._version for grad in self.grads]

    def is_dropped(self) -> bool:
        """Whether the optimizer has no gradients any more, so that the next ones begin a new window."""
        return not gradients(self.optimizer)

    def is_current(self) -> bool:
        """Whether the gradients that the optimizer has now are unscaled."""
        if not self.has_stepped:
            return True
        now = gradients(self.optimizer)
        return len(now) == len(self.grads) and all(
            grad is known and grad._version == version
            for grad, known, version in zip(now, self.grads, self._versions, strict=True)
        )

    def unscale_arrivals(self, inv_scale: Tensor) -> list[RemovableHandle]:
        """Unscale each gradient that a backward pass adds as it arrives, until the handles are removed.

        The hooks are on autograd's accumulation into ``.grad``, so they do not affect ``torch.autograd.grad``.
        """

        def unscale(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            self.is_counted = False
            return tuple(
                None
                if grad is None
                else reference.unscaled([grad], [grad.dtype], inv_scale, self.found_inf)[0]
                for grad in arrived
            )

        return [
            get_gradient_edge(parameter).node.register_prehook(unscale)
            for parameter in params_of(self.optimizer)
            if parameter.requires_grad
        ]

    def nonfinite_names(self) -> tuple[str, ...]:
        """Where in ``optimizer.param_groups`` the gradients are not finite. Waits for the device."""
        return tuple(
            f"param_groups[{g}]['params'][{i}]"
            for g, group in enumerate(self.optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
            if parameter.grad is not None and not foreach.all_finite([parameter.grad])
        )


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters, each once."""
    grads = (parameter.grad for parameter in params_of(optimizer))
    return list({id(grad): grad for grad in grads if grad is not None}.values())
