"""SkipCount: tells of skipped steps without waiting for the device."""

from __future__ import annotations

from halfpeak.engine.engine import Engine
from halfpeak.ops.async_scalar import AsyncScalar


class SkipCount:
    """Whether steps were skipped, as soon as their count has reached the host: a step or two late on an accelerator."""

    def __init__(self, engine: Engine) -> None:
        self._count = AsyncScalar(engine.device)
        self._known = 0.0

    def has_grown(self, engine: Engine) -> bool:
        """Whether a skip has come to be known since the last call."""
        self._count.push(engine.num_skipped)
        before, self._known = self._known, self._count.value
        return self._known > before
