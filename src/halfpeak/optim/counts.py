"""Counting backward passes as ``mmengine`` does: divisors, updates and synchronisation of an accumulating wrapper."""

from __future__ import annotations

import operator

from halfpeak.core.errors import ConfigError


class Counts:
    """How many backward passes there were, and what follows from it.

    A window ends after every ``every``-th backward pass of the run, and at ``total`` where that is known; it begins
    where the one before it ended. The losses in a window are divided by its length. Windows are absolute: they ignore
    epochs and resumes.

    Raises:
        ConfigError: ``every`` is not a positive integer.

    >>> counts = Counts(3)
    >>> counts.start(0, 7)
    >>> plan = []
    >>> for _ in range(7):
    ...     divisor = counts.divisor()
    ...     counts.done += 1
    ...     plan.append((divisor, counts.is_update()))
    >>> plan
    [(3, False), (3, False), (3, True), (3, False), (3, False), (3, True), (1, True)]
    """

    def __init__(self, every: int) -> None:
        self.every = _require_int("accumulative_counts", every, least=1)
        self.done = 0
        self.total = -1

    def start(self, done: int, total: int) -> None:
        """Say how many backward passes there were before, and how many there will be; a total of -1 is unknown.

        Raises:
            ConfigError: a number that is not an integer, or too small. Nothing was changed.
        """
        done = _require_int("init_counts", done, least=0)
        self.total = _require_int("max_counts", total, least=-1)
        self.done = done

    @property
    def remainder(self) -> int:
        """Length of the last window, 0 if it is a whole one; -1 while the total is unknown."""
        return -1 if self.total == -1 else self.total % self.every

    def divisor(self) -> int:
        """By what the coming loss is divided: the length of the window it falls into."""
        begin = self.done - self.done % self.every
        end = begin + self.every
        if self.done < self.total:
            end = min(end, self.total)
        else:
            begin = max(begin, self.total)
        return end - begin

    def is_update(self) -> bool:
        """After a backward pass: whether a step is due."""
        return self._ends_window(self.done)

    def is_sync(self) -> bool:
        """Before a backward pass: whether its gradients must be reduced over the ranks."""
        return self._ends_window(self.done + 1)

    def is_inside(self) -> bool:
        """Whether a window has begun and not ended."""
        return not self._ends_window(self.done)

    def _ends_window(self, done: int) -> bool:
        return done % self.every == 0 or done == self.total


def _require_int(name: str, value: object, *, least: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ConfigError(
            f"{name}={value!r} must be an integer of {least} or more; write {name}={max(least, 1)}"
        )
    return number
