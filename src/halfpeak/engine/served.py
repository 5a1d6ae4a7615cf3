"""Served: gradients that a fused optimizer's step measures, clips and reads where they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfpeak.engine.bypass import require_taken_in
from halfpeak.engine.intake import are_numbers
from halfpeak.engine.slots import Phase
from halfpeak.fused.books import Account, Books
from halfpeak.fused.layout import gradients_of
from halfpeak.fused.optimizer import Feed, FusedOptimizer
from halfpeak.ops import foreach
from halfpeak.parts.clip import Clip, NoClip, limit_of_norm

if TYPE_CHECKING:
    from halfpeak.engine.lane import Lane
    from halfpeak.engine.roster import Roster


class Served(ABC):
    """The gradients of a window, in whatever form they wait, and the one optimizer that reads them.

    Args:
        lane: of the fused optimizer.
        factor: what makes the gradients true-sized.  # f32[]
    """

    def __init__(self, lane: Lane, factor: Tensor) -> None:
        # The lane holds what waits for it: without a cycle, an open window goes with its engine.
        self._lane = proxy(lane)
        self._factor = factor
        self._feed = Feed((), (), factor)

    @abstractmethod
    def are_there(self) -> bool:
        """Whether the optimizer was not told to drop them."""

    @abstractmethod
    def take_in(self) -> None:
        """Make them true-sized float32 after all, where the optimizer reads them by itself."""

    @abstractmethod
    def withdraw(self, *, keep: bool) -> bool:
        """The step is over. Parameters' own gradients stay, true-sized and clipped, if they are to be kept.

        Returns:
            Whether nothing else is left.
        """

    def measure(self, books: Books | None = None) -> Tensor | Account:
        """Read them once.

        Args:
            books: for an optimizer that can decide where the gradients are. It is ready to step then.

        Returns:
            The sum of squares, true-sized; ``found_inf`` is set. Or what has come of the books.  # f32[]
        """
        roster = self._lane.roster()
        self._feed = Feed(self._gradients(roster), roster.sources, self._factor)
        account = None if books is None else self._optimizer.account(self._feed, books)
        if account is not None:
            self._feed = self._feed._replace(factor=account.factor)
            self.serve(None)
            return account
        reading = self._optimizer.measure(self._feed)
        self._note(reading.found_inf)
        return reading.squares

    def serve(self, coefficient: Tensor | None) -> None:
        """Let the optimizer's coming step read them, multiplied by what clipping asks for.  # f32[]"""
        if coefficient is not None:
            self._feed = self._feed._replace(factor=self._factor * coefficient)
        self._optimizer.feed(self._feed)

    def release(self) -> None:
        """Nobody is to read them any more."""
        self._optimizer.feed(None)

    @abstractmethod
    def _gradients(self, roster: Roster) -> Sequence[Tensor | None]:
        """What the optimizer reads, in the order of its groups."""

    def _note(self, found_inf: Tensor) -> None:
        self._lane.found_inf = torch.maximum(self._lane.found_inf, found_inf)

    @property
    def _optimizer(self) -> FusedOptimizer:
        optimizer = self._lane.optimizer
        assert isinstance(optimizer, FusedOptimizer)
        return optimizer


class Taken(Served):
    """Gradients that have been taken in: sums over a window, or what somebody wanted to see before the step.

    They are clipped by the pass that steps, and squares are added up in the order in which they would have been had nobody
    looked: a checkpoint between backward and step changes no bit of a run.
    """

    def are_there(self) -> bool:
        """Always: whoever drops them drops what lies there."""
        return True

    def take_in(self) -> None:
        """They are what they are."""
        self._lane.phase = Phase.UNSCALED

    def withdraw(self, *, keep: bool) -> bool:
        """See :class:`Served`."""
        if keep and self._feed.factor is not self._factor:
            foreach.scale_(
                [g for g in gradients_of(self._lane.slots().plain) if g is not None], self._feed.factor
            )
        return False

    def _gradients(self, roster: Roster) -> Sequence[Tensor | None]:
        return gradients_of(roster.targets)


def can_serve(lanes: Sequence[Lane]) -> bool:
    """Whether the step itself may read the gradients: one optimizer, a fused one.

    A step hook of somebody else's is a look at gradients.
    """
    return (
        len(lanes) == 1
        and lanes[0].count == 1
        and isinstance(lanes[0].optimizer, FusedOptimizer)
        and all(map(_is_own, lanes[0].optimizer._optimizer_step_pre_hooks.values()))
        and not _global_optimizer_pre_hooks
    )


def serve_taken(lanes: Sequence[Lane], clip: Clip) -> None:
    """Let the coming step read gradients that have been taken in, where it can."""
    if fits(clip) and lanes[0].phase is Phase.UNSCALED and can_serve(lanes):
        (lane,) = lanes
        require_taken_in(lane)
        grads = [grad for grad in gradients_of(lane.roster().targets) if grad is not None]
        if grads and are_numbers(grads):
            lane.defer(Taken(lane, torch.ones_like(lane.found_inf)))


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


def _is_own(hook: Callable[..., object]) -> bool:
    return hook.__module__.startswith("halfpeak.engine.") if hasattr(hook, "__module__") else False
