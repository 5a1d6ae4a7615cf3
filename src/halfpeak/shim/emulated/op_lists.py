"""OpNames: ``amp.lists.functional_overrides.FP32_FUNCS`` and its kin, lists that scripts edit before ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

from halfpeak.amp.registration import register_promote_function
from halfpeak.casting.oplists import FLOAT32, LOW, PROMOTE, Rows


class OpNames(list[str]):
    """Names of functions with one rule; adding one registers it, removing one lets it match its input.

    >>> import torch
    >>> names = OpNames(torch.nn.functional, "torch.nn.functional", LOW, register_promote_function)
    >>> "linear" in names
    True
    """

    def __init__(self, module: Any, path: str, rows: Rows, register: Callable[[Any, str], None]) -> None:
        super().__init__(name for owner, names in rows if owner == path for name in names.split())
        self._module = module
        self._register = register

    def append(self, name: str, /) -> None:
        """The function gets the rule of this list at the next ``initialize``."""
        self._register(self._module, name)
        super().append(name)

    def extend(self, names: Iterable[str], /) -> None:
        """Each of the functions does."""
        for name in names:
            self.append(name)

    def insert(self, index: SupportsIndex, name: str, /) -> None:
        """As :meth:`append`."""
        self.append(name)

    def remove(self, name: str, /) -> None:
        """The function is cast no more: it computes in the widest dtype of its inputs."""
        super().remove(name)
        register_promote_function(self._module, name)


__all__ = ["FLOAT32", "LOW", "PROMOTE", "OpNames"]
