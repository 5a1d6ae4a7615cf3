"""Buckets: tell while a backward pass goes on that all gradients of some parameters are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Buckets:
    """Counts the gradients that autograd writes, by a hook on every parameter that does nothing else.

    Work per bucket instead of work per parameter: a hook costs half a microsecond, the smallest operation on its gradient
    several.

    Args:
        groups: the trainable parameters of each bucket.
        ready: a method, called with the number of a bucket whose last gradient is there. Its object is held weakly: hooks
            live as long as parameters.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], ready: Callable[[int], None]) -> None:
        self._sizes = [len(group) for group in groups]
        # Shared with the hooks. What is not waited for is below zero, or gets there, and meets zero never again.
        self._left = [0] * len(groups)
        self._handles = [
            handle
            for number, group in enumerate(groups)
            for handle in _hook(group, number, self._left, WeakMethod(ready))
        ]

    def begin(self) -> None:
        """A backward pass begins."""
        self._left[:] = self._sizes

    def end(self) -> set[int]:
        """It is over, and nobody is told any more.

        Returns:
            The buckets that were ready and to which autograd has not written since.
        """
        left = list(self._left)
        self._left[:] = [0] * len(left)
        return {number for number, count in enumerate(left) if count == 0}

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _hook(
    group: Sequence[Tensor], number: int, left: list[int], ready: WeakMethod[Callable[[int], None]]
) -> list[RemovableHandle]:
    def count(_: Any) -> None:
        left[number] -= 1
        if not left[number]:
            tell = ready()
            if tell is not None:
                tell(number)

    return [parameter.register_post_accumulate_grad_hook(count) for parameter in group]
