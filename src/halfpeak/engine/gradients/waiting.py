"""Low gradients that wait, scaled, for a later pass of the window to add to: they are added up in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfpeak.ops import foreach
from halfpeak.ops.foreach import are_dense


class WaitingGrads:
    """Sets low gradients aside in a backward pass after which they still wait, and adds the new ones to them.

    Autograd would add in their own dtype and lose digits with every pass. So each is rounded from the float32 sum of all
    passes; the last pass, which may reduce them over ranks, finds it where autograd adds.

    Args:
        parameters: low ones, before the pass.
        sums: of earlier passes, by ``id`` of the parameter.  # f32[...]
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Mapping[int, Tensor]) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for parameter in parameters:
            grad = parameter.grad
            # What is sparse or has a graph is left for autograd to add to.
            if grad is not None and are_dense([grad]):
                self._held.append((parameter, grad, sums.get(id(parameter))))
                parameter.grad = None

    def put_back(self, like: Tensor) -> dict[int, Tensor]:
        """After the pass: put back what was set aside, with the new gradients added.

        Args:
            like: a scalar on their device.

        Returns:
            The sums now, of parameters that several passes have reached.  # f32[...]
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
