"""Counting backward passes as ``mmengine`` does: divisors, updates and synchronisation of an accumulating wrapper."""

from __future__ import annotations

from halfpeak.core.errors import ConfigError, OrderError


class Counts:
    """How many backward passes there were, and what follows from it.

    Windows are absolute: ``[0, every) [every, 2*every) ...`` over the whole run; they ignore epochs and resumes. With a
    known total, the last, shorter window is divided by its own length and stepped at its end.

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
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"accumulative_counts={every!r} must be an integer of 1 or more")
        self.every = every
        self.done = 0
        self.total = -1
        self.remainder = -1

    def start(self, done: int, total: int) -> None:
        """Say how many backward passes there were before, and how many there will be; a total of -1 is unknown."""
        for name, value, least in (("init_counts", done, 0), ("max_counts", total, -1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be an integer of {least} or more")
        self.done, self.total = done, total
        self.remainder = total % self.every

    def divisor(self) -> int:
        """By what the coming loss is divided.

        Raises:
            OrderError: there were as many backward passes as announced, and they filled their windows.
        """
        if self.every == 1:
            return 1
        if self.total == -1 or self.done < self.total - self.remainder:
            return self.every
        if self.remainder == 0:
            raise OrderError(
                f"the loss would be divided by 0: {self.done} backward passes are done and max_counts={self.total} were "
                "announced; call initialize_count_status(model, init_counts, max_counts) with the real total, or "
                "max_counts=-1 where it is not known"
            )
        return self.remainder

    def is_update(self) -> bool:
        """After a backward pass: whether a step is due."""
        return self._ends_window(self.done)

    def is_sync(self) -> bool:
        """Before a backward pass: whether its gradients must be reduced over the ranks."""
        return self._ends_window(self.done + 1)

    def _ends_window(self, done: int) -> bool:
        return done % self.every == 0 or done == self.total
