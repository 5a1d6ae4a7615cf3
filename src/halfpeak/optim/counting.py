"""Counting: the half of a wrapper that knows when a step is due. It touches no gradient."""

from __future__ import annotations

import logging
from abc import abstractmethod

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfpeak.optim.counts import Counts

_logger = logging.getLogger("halfpeak.optim")


class Counting:
    """What a wrapper answers about accumulation; see :class:`~halfpeak.optim.counts.Counts` for the rule."""

    _counts: Counts

    @abstractmethod
    def _has_window(self) -> bool:
        """Whether gradients of an unfinished window are held, or will be when training goes on."""

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Say how many backward passes there were and how many there will be (-1: unknown).

        May be called again, as GAN training does at the start of each phase.
        """
        self._counts.start(init_counts, max_counts)
        if self._counts.is_inside() and not self._has_window():
            _logger.warning(
                "Resumed iteration number %d is not a multiple of accumulative_counts=%d, and the gradients of the "
                "open window were not saved: its step will be too small",
                self._counts.done,
                self._counts.every,
            )
        if self._counts.every > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
            _logger.warning(
                "Gradient accumulative training sees batch statistics of each small batch, not of the sum"
            )

    def should_update(self) -> bool:
        """After a backward pass: whether a step is due."""
        return self._counts.is_update()

    def should_sync(self) -> bool:
        """Before a backward pass: whether its gradients must be reduced over the ranks."""
        return self._counts.is_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss divided by the length of its window."""
        return loss / self._counts.divisor()

    @property
    def inner_count(self) -> int:
        """Backward passes so far."""
        return self._counts.done

    # What clients of mmengine read, and its tests write.

    @property
    def _inner_count(self) -> int:
        return self._counts.done

    @_inner_count.setter
    def _inner_count(self, value: int) -> None:
        self._counts.start(value, self._counts.total)

    @property
    def _accumulative_counts(self) -> int:
        return self._counts.every

    @property
    def _max_counts(self) -> int:
        return self._counts.total

    @property
    def _remainder_counts(self) -> int:
        return self._counts.remainder
