"""Float32 sums of low-precision gradients that wait, scaled, for a later pass of the window to add to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfpeak.ops import foreach
from halfpeak.ops.foreach import are_dense


class WaitingGrads:
    """Stashes waiting gradients during a delayed backward pass, and adds the new ones to them in float32.

    Autograd would add in the low dtype and lose digits with every pass. Here each ``.grad`` is the float32 sum of all
    passes, rounded. The last pass, which may reduce gradients over ranks, lets autograd add to that ``.grad``.

    Args:
        parameters: low-precision parameters, before the pass.
        sums: of earlier passes, by ``id`` of the parameter.  # f32[...]
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Mapping[int, Tensor]) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for parameter in parameters:
            grad = parameter.grad
            # A sparse gradient, or one with a graph, stays in place for autograd to add to.
            if grad is not None and are_dense([grad]):
                self._held.append((parameter, grad, sums.get(id(parameter))))
                parameter.grad = None

    def put_back_sums(self, like: Tensor) -> dict[int, Tensor]:
        """After the pass: restore the stashed gradients, with the new ones added.

        Args:
            like: a scalar on the device of the gradients.

        Returns:
            The new sums, of parameters that several passes have reached.  # f32[...]
        """
        sums: dict[int, Tensor] = {}
        added: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, held, total in self._held:
            fresh, parameter.grad = parameter.grad, held
            if fresh is not None and not are_dense([fresh]):
                parameter.grad = held + fresh
                continue
            if fresh is not None:
                total = held.float() if total is None else total
                added.append((total, fresh, held))
            if total is not None:
                sums[id(parameter)] = total
        if added:
            totals, grads, rounded = zip(*added, strict=True)
            foreach.accumulate_(totals, grads, torch.ones_like(like), torch.zeros_like(like))
            foreach.copy_cast_(rounded, totals)
        return sums
