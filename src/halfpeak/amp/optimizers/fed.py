"""What the optimizers of ``apex.contrib`` have in common: ``step(grads=, output_params=, scale=, grad_norms=)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError
from halfpeak.fused.layout import gradients_of, targets_of
from halfpeak.fused.optimizer import Feed, FusedOptimizer

Lists: TypeAlias = Iterable[Tensor | None] | Sequence[Sequence[Tensor | None]]
"""Tensors of one group, or lists of them, one per group."""


class FedForm(FusedOptimizer):
    """A fused optimizer whose groups hold float32 masters, and whose ``step`` is given gradients and low parameters."""

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Lists | None = None,
        output_params: Lists | None = None,
        scale: float = 1.0,
        grad_norms: Sequence[Tensor | float] | None = None,
    ) -> Any:
        """Move every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.
            grads: gradients for the parameters, as a list for each group, or one list for the only group; where there
                is none, the parameter's own.
            output_params: parameters that get the new values, rounded; in the same form.
            scale: what gradients are divided by.
            grad_norms: the norm of the scaled gradients of each group, for groups with a ``max_grad_norm``.

        Raises:
            ConfigError: lists of other lengths than the groups; a ``max_grad_norm`` without a norm.
        """
        if self._feed is not None:  # an engine steps it
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        targets = targets_of(self)
        given = _in_order("grads", grads, self.param_groups)
        written = _in_order("output_params", output_params, self.param_groups)
        pairs = zip(given, gradients_of(targets), strict=True)
        own = [grad if grad is not None else other for grad, other in pairs]
        lows = [low if low is not None else target for low, target in zip(written, targets, strict=True)]
        factors = self._factors(scale, grad_norms)
        for factor in dict.fromkeys(factors):
            chosen = [
                grad if mine == factor else None
                for grad, mine in zip(own, _spread(factors, self.param_groups), strict=True)
            ]
            self.feed(Feed(chosen, lows, torch.tensor(factor)))
            try:
                super().step()
            finally:
                self.feed(None)
        return loss

    def _factors(self, scale: float, norms: Sequence[Tensor | float] | None) -> list[float]:
        """What the gradients of each group are multiplied by."""
        found: list[float] = []
        for number, group in enumerate(self.param_groups):
            limit = group.get("max_grad_norm", 0.0)
            if limit and norms is None:
                raise ConfigError(
                    f"max_grad_norm={limit!r} needs grad_norms; step through FP16_Optimizer, or give them to step()"
                )
            clip = (float(norms[number]) / scale + 1e-6) / limit if limit and norms is not None else 1.0
            found.append(1.0 / (scale * max(clip, 1.0)))
        return found


def _in_order(name: str, lists: Lists | None, groups: Sequence[dict[str, Any]]) -> list[Tensor | None]:
    sizes = [len(group["params"]) for group in groups]
    if lists is None:
        return [None] * sum(sizes)
    given: list[Any] = list(lists)
    by_group = given if given and isinstance(given[0], (list, tuple)) else [given]
    if [len(one) for one in by_group] != sizes:
        raise ConfigError(
            f"{name} has lists of {[len(one) for one in by_group]} tensors; the groups have {sizes}"
        )
    return [tensor for one in by_group for tensor in one]


def _spread(values: Sequence[float], groups: Sequence[dict[str, Any]]) -> list[float]:
    return [value for value, group in zip(values, groups, strict=True) for _ in group["params"]]
