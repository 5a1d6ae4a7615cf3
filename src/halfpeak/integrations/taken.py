"""What a gradient scaler knows about the gradients of one optimizer: that they have their true size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.ops import foreach, reference


class Taken:
    """The gradients of one optimizer from the moment they are divided by the scale until they are gone.

    Attributes:
        optimizer: whose.
        grads: those that were divided, or found divided already.
        found_inf: 1 if one of them, or one that arrived since, was not finite.  # f32[]
        has_stepped: whether the optimizer has used them.
        is_counted: whether the loss scale has moved by them.
    """

    def __init__(self, optimizer: Optimizer, inv_scale: Tensor, known: Iterable[Tensor]) -> None:
        self.optimizer = optimizer
        self.grads = gradients(optimizer)
        self.found_inf = torch.zeros_like(inv_scale)
        self.has_stepped = False
        self.is_counted = False
        self._versions: list[int] = []
        done = {id(grad) for grad in known}
        with torch.no_grad():
            # One that two optimizers share is divided once; both have to know whether it is finite.
            foreach.check_([grad for grad in self.grads if id(grad) in done], self.found_inf)
            fresh = [grad for grad in self.grads if id(grad) not in done]
            foreach.unscale_(fresh, inv_scale, self.found_inf)

    def verdict(self) -> Tensor:
        """Whether a step must be skipped.  # f32[]"""
        if self.is_counted:
            # The window went on without a step. If its gradients were zeroed meanwhile, what was found in them is over.
            still = torch.zeros_like(self.found_inf)
            foreach.check_(gradients(self.optimizer), still)
            self.found_inf = torch.minimum(self.found_inf, still)
        return self.found_inf.clone()

    def close(self) -> None:
        """The optimizer has used them."""
        self.has_stepped = True
        self.grads = gradients(self.optimizer)
        self._versions = [grad._version for grad in self.grads]

    def is_gone(self) -> bool:
        """Whether somebody dropped them all: the next ones have nothing to do with them."""
        return not gradients(self.optimizer)

    def is_current(self) -> bool:
        """Whether what lies there now has its true size."""
        if not self.has_stepped:
            return True
        now = gradients(self.optimizer)
        return len(now) == len(self.grads) and all(
            grad is known and grad._version == version
            for grad, known, version in zip(now, self.grads, self._versions, strict=True)
        )

    def divide_arrivals(self, inv_scale: Tensor) -> list[RemovableHandle]:
        """Divide what a backward pass adds from now on as it arrives, until the handles are removed.

        The division happens where autograd accumulates, so ``torch.autograd.grad`` does not see it.
        """

        def divide(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(
                None
                if grad is None
                else reference.unscaled([grad], [grad.dtype], inv_scale, self.found_inf)[0]
                for grad in arrived
            )

        return [
            get_gradient_edge(parameter).node.register_prehook(divide)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def culprits(self) -> tuple[str, ...]:
        """Where in the optimizer the gradients stand that are not finite. Waits for the device."""
        return tuple(
            f"param_groups[{g}]['params'][{i}]"
            for g, group in enumerate(self.optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
            if parameter.grad is not None and not is_finite(parameter.grad)
        )


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that lie on an optimizer's parameters, each once."""
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return list({id(grad): grad for grad in grads if grad is not None}.values())


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is. Waits for the device."""
    found_inf = torch.zeros((), device=tensor.device)
    foreach.check_([tensor], found_inf)
    return not bool(found_inf)
