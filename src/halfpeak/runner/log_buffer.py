"""LogBuffer: numbers of past iterations and their averages, for the log. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_dict

Number = float | Tensor


class LogBuffer:
    """Collects named numbers with weights, and averages the latest.

    Tensors stay on their device; only averaging or reading waits for the device.

    Attributes:
        n_history: the weights of :attr:`val_history`, usually batch sizes.
        output: the averages, and values that hooks add.
        ready: whether loggers should log ``output``.

    >>> buffer = LogBuffer()
    >>> buffer.update({"loss": 1.0}, count=3)
    >>> buffer.update({"loss": 2.0}, count=1)
    >>> buffer.average()
    >>> buffer.output
    {'loss': 1.25}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Number]] = {}
        self.n_history: dict[str, list[float]] = {}
        self.output: dict[str, Any] = {}
        self.ready = False

    @property
    def val_history(self) -> dict[str, list[float]]:
        """Every value since :meth:`clear`, by name, as numbers. Waits for the device."""
        for values in self._values.values():
            values[:] = [float(value) for value in values]
        return self._values  # type: ignore[return-value]

    def update(self, vars: Mapping[str, Number], count: float = 1) -> None:
        """Add one value per name.

        Raises:
            ConfigTypeError: not a dict of numbers. Nothing was added.
        """
        require_dict("the numbers to log", vars, "dict(loss=loss.item())")
        numbers = {name: _number(name, value) for name, value in vars.items()}
        for name, value in numbers.items():
            self._values.setdefault(name, []).append(value)
            self.n_history.setdefault(name, []).append(count)

    def average(self, n: int = 0) -> None:
        """Put the weighted mean of each name's last ``n`` values (0: all) into ``output``. Waits for the device.

        Names that were not updated recently are averaged over their last values too.

        Raises:
            ConfigError: ``n`` is negative.
        """
        if n < 0:
            raise ConfigError(f"n={n} must be 0 (all values) or the number of last values to average")
        for name, history in self._values.items():
            values, counts = [float(value) for value in history[-n:]], self.n_history[name][-n:]
            total = math.fsum(counts)
            weighted = math.fsum(value * count for value, count in zip(values, counts, strict=True))
            self.output[name] = weighted / total if total else math.nan
        self.ready = True

    def clear_output(self) -> None:
        """Drop ``output``; the collected values stay."""
        self.output.clear()
        self.ready = False

    def clear(self) -> None:
        """Drop everything."""
        self._values.clear()
        self.n_history.clear()
        self.clear_output()


def _number(name: str, value: Any) -> Number:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()  # a copy, because the caller may change the tensor in place
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigTypeError(
            f"{name}={short_repr(value)} is not a number; the log averages, so write {name}=value.mean()"
        ) from None
