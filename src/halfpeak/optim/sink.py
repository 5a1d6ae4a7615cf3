"""Where a wrapper's scalars go: its own history, or whatever the caller passes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Sink(Protocol):
    """Takes a named scalar. mmengine's ``MessageHub`` is one."""

    def update_scalar(self, key: str, value: Tensor) -> None:
        """Take one value: a scalar tensor on its device."""
        ...


class ScalarHistory:
    """Keeps scalars as they come, on their device; reading them is what waits.

    >>> import torch
    >>> history = ScalarHistory()
    >>> history.update_scalar("train/grad_norm", torch.tensor(2.0))
    >>> history.read("train/grad_norm")
    [2.0]

    Args:
        limit: how many values of each name are kept.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._values: dict[str, list[Tensor]] = {}

    def update_scalar(self, key: str, value: Tensor) -> None:
        """Keep a value. Does not wait for the device."""
        values = self._values.setdefault(key, [])
        values.append(value.detach())
        del values[: -self._limit]

    def read(self, key: str) -> list[float]:
        """Every value of a name, oldest first. Waits for the device."""
        return [float(value) for value in self._values.get(key, [])]

    def current(self) -> Mapping[str, Tensor]:
        """The latest value of every name, still on its device."""
        return {key: values[-1] for key, values in self._values.items()}


def message_hub() -> Sink | None:
    """mmengine's current ``MessageHub`` if mmengine is in use, else None.

    Asked when a value is there rather than when a wrapper is made: a hub is often made after the wrapper.
    """
    logging: Any = sys.modules.get("mmengine.logging")
    return None if logging is None else logging.MessageHub.get_current_instance()
