"""Deferred: gradients that stay as autograd left them until the step of a fused optimizer reads them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from weakref import proxy

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfpeak.engine.bypass import refuse_edited
from halfpeak.engine.trace import Trace
from halfpeak.fused.books import Account, Books
from halfpeak.fused.layout import gradients_of
from halfpeak.fused.optimizer import Feed, FusedOptimizer
from halfpeak.ops import foreach
from halfpeak.parts.clip import Clip, NoClip, limit_of_norm
from halfpeak.parts.loss_scaler import LossScaler

if TYPE_CHECKING:
    from halfpeak.engine.block import Block
    from halfpeak.engine.lane import Lane


def can_defer(lanes: Sequence[Lane]) -> bool:
    """Whether the step itself may read the gradients of a backward pass that begins a window: one optimizer, a fused one.

    A step hook of somebody else's is a look at gradients.
    """
    return (
        len(lanes) == 1
        and lanes[0].count == 1
        and isinstance(lanes[0].optimizer, FusedOptimizer)
        and all(map(_is_own, lanes[0].optimizer._optimizer_step_pre_hooks.values()))
        and not _global_optimizer_pre_hooks
    )


class Deferred:
    """The gradients of one backward pass, low and scaled; the sum of their squares once it is measured.

    Nobody can tell whether somebody who writes to them meanwhile takes them for true-sized, so that is refused; except
    where they are, or where zeros are written. ``optimizer.zero_grad()`` reaches masters only. It is noticed by a marker
    that lies as the gradient of one of them, too small to count but in a way that a factor leaves it above zero.

    Args:
        lane: of the fused optimizer.
        block: of the backward pass. Its ``found_inf`` is known from :meth:`measure` or :meth:`take_in` on.
        scaler: whose scale that was.
        scale: what the loss was multiplied by.  # f32[]
    """

    def __init__(self, lane: Lane, block: Block, scaler: LossScaler, scale: Tensor) -> None:
        is_true = not scaler.config.dynamic and scaler.config.init == 1
        self._masters = block.slots.highs
        self._marker = lane.roster().smallest_master
        if self._marker is not None:
            self._marker.grad = torch.full_like(self._marker, _MARK)
        waiting = block.slots.lows if is_true else block.slots.sources
        self._trace = Trace()
        self._trace.keep(waiting if self._marker is None else [*waiting, self._marker])
        # The lane holds what waits for it: without a cycle, an open window goes with its engine.
        self._lane = proxy(lane)
        block.hold_weakly()
        self._block = block
        self._inv_scale = scale.reciprocal()
        self._scale = scale
        self._feed = Feed((), (), self._inv_scale)
        self._is_untouched = False

    def are_there(self) -> bool:
        """Whether the optimizer was not told to drop them.

        Raises:
            OrderError: somebody has written to them, or has given the masters gradients.
        """
        touched = self._trace.touched()
        refuse_edited(touched)
        self._is_untouched = not touched
        marker, self._marker = self._marker, None
        if marker is None:
            return True
        left, marker.grad = marker.grad, None
        given = gradients_of(self._masters)
        if given.count(None) < len(given):
            refuse_edited(given)
        if any(grad is left for grad in touched if grad is not None):
            # zero_grad(set_to_none=False): zeros are what the optimizer is to read.
            torch._foreach_zero_([g for g in gradients_of(self._lane.roster().sources) if g is not None])
        return left is not None

    def take_in(self) -> None:
        """Make them true-sized float32 after all."""
        self._block.absorb(self._scale)

    def measure(self, books: Books | None = None) -> Tensor | Account:
        """Read them once.

        Args:
            books: for an optimizer that can decide where the gradients are. It is ready to step then.

        Returns:
            The sum of squares, true-sized; ``found_inf`` of block and lane are set. Or what has come of the books.  # f32[]
        """
        roster = self._lane.roster()
        # They have just been looked at.
        known = self._trace.known(roster.sources) if self._is_untouched else None
        grads = gradients_of(roster.sources) if known is None else known
        self._feed = Feed(grads, roster.sources, self._inv_scale)
        account = None if books is None else self._optimizer.account(self._feed, books)
        if account is not None:
            self._feed = self._feed._replace(factor=account.factor)
            self.serve(None)
            return account
        reading = self._optimizer.measure(self._feed)
        self._block.found_inf.copy_(reading.found_inf)
        self._lane.found_inf = torch.maximum(self._lane.found_inf, reading.found_inf)
        return reading.squares

    def serve(self, coefficient: Tensor | None) -> None:
        """Let the optimizer's coming step read them, multiplied by what clipping asks for.  # f32[]"""
        if coefficient is not None:
            self._feed = self._feed._replace(factor=self._inv_scale * coefficient)
        self._optimizer.feed(self._feed)

    def withdraw(self, *, keep: bool) -> None:
        """The step is over. Gradients of masters go; others stay true-sized and clipped if they are to be kept."""
        slots = self._block.slots if keep else ()
        own = [(s.source, s.source.grad) for s in slots if s.source is s.target and s.source.grad is not None]
        for source in self._feed.lows:
            source.grad = None
        if own:
            foreach.scale_([grad for _, grad in own], self._feed.factor)
        for source, grad in own:
            source.grad = grad

    def release(self) -> None:
        """Nobody is to read them any more."""
        self._optimizer.feed(None)

    @property
    def _optimizer(self) -> FusedOptimizer:
        optimizer = self._lane.optimizer
        assert isinstance(optimizer, FusedOptimizer)
        return optimizer


def _is_own(hook: Callable[..., object]) -> bool:
    return hook.__module__.startswith("halfpeak.engine.") if hasattr(hook, "__module__") else False


_MARK: Final = 2.0**-100


def fits(clip: Clip) -> bool:
    """Whether a clip needs nothing of the gradients but the sum of their squares."""
    return isinstance(clip, NoClip) or limit_of_norm(clip) is not None


def coefficient(clip: Clip, squares: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The norm of the gradients, and what to multiply them by; None where nothing is clipped.  # f32[], f32[]"""
    limit = limit_of_norm(clip)
    if limit is None:
        return None, None
    norm = squares.sqrt()
    return norm, torch.clamp(limit / (norm + 1e-6), max=1.0)
