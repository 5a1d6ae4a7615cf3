"""Release: gradients are taken in while the backward pass that makes them goes on, bucket by bucket, and are gone at once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.engine.block import Block
from halfpeak.engine.buckets import Buckets
from halfpeak.engine.intake import Intake
from halfpeak.engine.slots import Slot
from halfpeak.engine.sync import synchronising
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.ops import chunks
from halfpeak.parts.verdict import is_multi_rank


class Release:
    """Takes the gradients of a bucket in when the last of them is there, while they lie in the cache.

    ::

        open      set aside gradients
        (backward: for each bucket that is complete
            target.grad += source.grad / scale, found_inf; source.grad is dropped)
        absorb    what is left: parameters without a gradient leave their bucket incomplete
        step      verdict, clip, update: as without

    So no backward pass holds a whole set of fresh gradients beside the sums.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._slots: list[Slot] = []
        self._groups: list[list[Slot]] = []
        self._buckets = Buckets((), self._take)
        self._intake: Intake | None = None
        self._taken: list[int] = []

    @contextmanager
    def during(self, block: Block | None, scale: Tensor) -> Generator[bool]:
        """Take in while the body runs a backward pass.

        Args:
            block: of the backward pass; None if its gradients are to stay where autograd leaves them.
            scale: what the loss was multiplied by.  # f32[]

        Yields:
            Whether gradients are taken in.

        Raises:
            ConfigError: there are several ranks by now.
            OrderError: something other than autograd has written gradients after they were taken in.
        """
        if not self._on or block is None:
            yield False
            return
        _refuse_ranks()
        self._look(block.slots)
        self._intake = block.intake(scale)
        self._taken.clear()
        self._buckets.begin()
        try:
            yield True
        finally:
            quiet = self._buckets.end()
            self._intake = None
        taken = (self._groups[number] for number in quiet & set(self._taken))
        if any(slot.source.grad is not None for group in taken for slot in group):
            raise OrderError(
                "gradients were written after release_gradients=True had taken them in, perhaps by a parallel wrapper that "
                "averages them over ranks at the end of a backward pass; prepare without release_gradients there"
            )

    def synchronising(self, wrapped: nn.Module, synchronise: bool) -> AbstractContextManager[None]:
        """:func:`halfpeak.engine.sync.synchronising`, where gradients are not gone before ranks have averaged them.

        Raises:
            ConfigError: they would be.
        """
        if self._on:
            _refuse_wrapped(wrapped)
        return synchronising(wrapped, synchronise)

    def remove(self) -> None:
        """Take the hooks off."""
        self._buckets.remove()
        self._slots = []

    @torch.no_grad()
    def _take(self, number: int) -> None:
        if self._intake is not None and self._intake.take_early(self._groups[number]):
            self._taken.append(number)

    def _look(self, slots: list[Slot]) -> None:
        """Hooks for the parameters that take part now."""
        if slots is self._slots:
            return
        self._buckets.remove()
        # What was frozen inside the window still belongs to it, but backward brings it nothing.
        live = [slot for slot in slots if slot.source.requires_grad]
        self._groups = list(_grouped(live))
        self._buckets = Buckets([[slot.source for slot in group] for group in self._groups], self._take)
        self._slots = slots


SMALLEST: Final = 2**18
"""Elements of a bucket from which taking it in costs more than telling that it is complete."""

LARGEST: Final = 2**22
"""Elements from which a bucket is complete, however large the model."""


def check_release(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Check what ``release_gradients=True`` is asked for.

    Raises:
        ConfigError: not one fused optimizer, or several ranks.
    """
    if len(optimizers) != 1 or not isinstance(optimizers[0], FusedOptimizer):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ConfigError(
            f"release_gradients=True is for one optimizer of halfpeak.fused, not {names}; write FusedAdamW(...), or leave "
            "it out"
        )
    _refuse_ranks()
    for model in models:
        _refuse_wrapped(model)


def _grouped(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Neighbours, in the order in which backward is likely to come by: an eighth of all elements at a time, or about that.

    Small ones are left for the end, where they are taken in all at once, unless they are what the model is made of.
    """
    whole = sum(slot.source.numel() for slot in slots)
    limit = min(max(whole // 8, SMALLEST), LARGEST)
    large = [slot for slot in slots if slot.source.numel() >= chunks.WORTH_IT]
    small = [slot for slot in slots if slot.source.numel() < chunks.WORTH_IT]
    for kind in (large, small):
        group: list[Slot] = []
        size = 0
        for slot in reversed(kind):
            group.append(slot)
            size += slot.source.numel()
            if size >= limit:
                yield group
                group, size = [], 0
        if group and kind is large:
            yield group


def _refuse_ranks() -> None:
    """Raise ConfigError where this process is one of several ranks."""
    if is_multi_rank():
        raise ConfigError(
            "release_gradients=True takes gradients in before several ranks have averaged them; leave it out there"
        )


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ConfigError for a module that averages gradients over ranks, however few they are."""
    if callable(getattr(model, "no_sync", None)) or callable(
        getattr(model, "set_requires_gradient_sync", None)
    ):
        raise ConfigError(
            f"release_gradients=True takes gradients in before {type(model).__name__} has averaged them; leave it out, or "
            "pass no wrapped module"
        )
