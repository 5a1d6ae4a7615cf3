"""BackwardCounts: gradient accumulation counted as ``mmengine`` does."""

from __future__ import annotations

from halfpeak.optim.arguments import require_count


class BackwardCounts:
    """The number of backward passes so far, and which of them end an accumulation window.

    A window ends after every ``every``-th backward pass of the run, and at ``total`` where that is known; the next one
    begins there. The losses in a window are divided by its length. Windows are absolute: they ignore
    epochs and resumes.

    Raises:
        ConfigError: ``every`` is not a positive integer.

    >>> counts = BackwardCounts(3)
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
        self.every = require_count("accumulative_counts", every, 1, "; write accumulative_counts=1")
        self.done = 0
        self.total = -1

    def start(self, done: int, total: int) -> None:
        """Set how many backward passes there were, and how many there will be; a total of -1 is unknown.

        Raises:
            ConfigError: a number is not an integer, or too small.
        """
        done = require_count("init_counts", done, 0, "; write init_counts=1")
        self.total = require_count("max_counts", total, -1, "; write max_counts=1")
        self.done = done

    @property
    def remainder(self) -> int:
        """Length of the last window, 0 if it is a whole one; -1 while the total is unknown."""
        return -1 if self.total == -1 else self.total % self.every

    def divisor(self) -> int:
        """The length of the window of the coming loss, by which it is divided."""
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
