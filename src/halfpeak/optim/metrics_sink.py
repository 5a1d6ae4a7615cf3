"""Destinations of a wrapper's scalars and warnings: halfpeak's own, mmengine's, or the caller's."""

from __future__ import annotations

import logging
import sys
from collections import deque
from typing import Any, Protocol

from torch import Tensor

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_count


class Sink(Protocol):
    """Receives named scalars. mmengine's ``MessageHub`` is one."""

    def update_scalar(self, key: str, value: Tensor) -> None:
        """Store one value, a scalar tensor on its device."""
        ...


class ScalarHistory:
    """Stores scalars on their device; only reading them waits.

    Args:
        limit: how many values of each name are kept.

    Raises:
        ConfigError: ``limit`` is not a positive integer.

    >>> import torch
    >>> history = ScalarHistory()
    >>> history.update_scalar("train/grad_norm", torch.tensor(2.0))
    >>> history.read("train/grad_norm")
    [2.0]
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = require_count("limit", limit)
        self._values: dict[str, deque[Tensor]] = {}

    def update_scalar(self, key: str, value: Tensor) -> None:
        """Append a value. Does not wait for the device."""
        self._values.setdefault(key, deque(maxlen=self._limit)).append(value.detach())

    def read(self, key: str) -> list[float]:
        """Every value of a name, oldest first. Waits for the device."""
        return [float(value) for value in self._values.get(key, ())]


def check_sink(sink: object) -> None:
    """Raise ConfigTypeError unless ``sink`` is None or has the method of :class:`Sink`."""
    if sink is not None and (isinstance(sink, type) or not callable(getattr(sink, "update_scalar", None))):
        raise ConfigTypeError(
            f"sink={short_repr(sink)} has no update_scalar(key, value); pass a ScalarHistory(), a MessageHub, or an object "
            "with that method"
        )


def message_hub() -> Sink | None:
    """Return mmengine's current ``MessageHub`` if mmengine is imported, else None.

    Called for each value, because user code often makes the hub after the wrapper.
    """
    hub: Any = getattr(sys.modules.get("mmengine.logging"), "MessageHub", None)
    return None if hub is None else hub.get_current_instance()


def current_logger() -> logging.Logger:
    """Return mmengine's current logger if mmengine is imported, else halfpeak's logger."""
    loggers: Any = getattr(sys.modules.get("mmengine.logging"), "MMLogger", None)
    return logging.getLogger("halfpeak.optim") if loggers is None else loggers.get_current_instance()
