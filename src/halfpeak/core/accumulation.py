"""Gradient accumulation as arithmetic: how many backward passes make one step, and the divisor of each loss."""

from __future__ import annotations

from dataclasses import dataclass

from halfpeak.core.errors import ConfigError
from halfpeak.core.keywords import known_fields
from halfpeak.core.short_repr import short_repr


@known_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """Every ``every`` backward passes make one optimizer step, which uses the mean of their gradients.

    Windows are absolute: ``[0, every) [every, 2*every) ...`` over the whole run. When ``total``, the number of backward
    passes of the run, is known and not a multiple of ``every``, the last window is shorter and its losses are divided
    by its own length. So are those of a pass after the end, where a new window begins.

    Raises:
        ConfigError: ``every`` is not a positive integer, or ``total`` is neither None nor a positive integer.

    >>> plan = Accumulation(every=3, total=7)
    >>> [(i, plan.divisor(i), plan.is_boundary(i)) for i in range(7)]
    [(0, 3, False), (1, 3, False), (2, 3, True), (3, 3, False), (4, 3, False), (5, 3, True), (6, 1, True)]
    """

    every: int = 1
    total: int | None = None

    def __post_init__(self) -> None:
        if not _is_positive_int(self.every):
            raise ConfigError(
                f"accumulate={short_repr(self.every)} must be an integer of 1 or more; write accumulate=4"
            )
        if self.total is not None and not _is_positive_int(self.total):
            raise ConfigError(
                f"total={short_repr(self.total)} must be None or the number of backward passes of the run"
            )

    def divisor(self, index: int) -> int:
        """The number by which the loss of backward pass ``index`` (counted from 0) is divided."""
        if self.total is None:
            return self.every
        begin = index - index % self.every
        end = begin + self.every
        return min(end, self.total) - begin if index < self.total else end - max(begin, self.total)

    def is_boundary(self, index: int) -> bool:
        """Whether a step follows backward pass ``index`` (counted from 0)."""
        return (index + 1) % self.every == 0 or index + 1 == self.total


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
