"""``apex.amp.lists``, such as ``functional_overrides.FP32_FUNCS``: lists that scripts edit before ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, SupportsIndex

import torch

from halfpeak.amp.registration import (
    register_float_function,
    register_half_function,
    register_promote_function,
)
from halfpeak.casting.oplists import FLOAT32, LOW, PROMOTE, Rows


class OpNames(list[str]):
    """A list of functions with one cast rule. Adding a name registers it; removing a name makes the function promote.

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
        """Add a function, which gets the rule of this list at the next ``initialize``."""
        self._register(self._module, name)
        super().append(name)

    def extend(self, names: Iterable[str], /) -> None:
        """Add several functions."""
        for name in names:
            self.append(name)

    def insert(self, index: SupportsIndex, name: str, /) -> None:
        """Add a function as :meth:`append` does; ``index`` has no effect."""
        self.append(name)

    def remove(self, name: str, /) -> None:
        """Remove a function; it then computes in the widest dtype of its inputs."""
        super().remove(name)
        register_promote_function(self._module, name)


class Overrides:
    """The lists of one module of ``apex.amp.lists``, before a script edits them.

    Args:
        module: the module or class that has the functions.
        path: its name in :mod:`halfpeak.casting.oplists`.
    """

    def __init__(self, module: Any, path: str) -> None:
        self.MODULE = module
        self.FP16_FUNCS = OpNames(module, path, LOW, register_half_function)
        self.FP32_FUNCS = OpNames(module, path, FLOAT32, register_float_function)
        self.CASTS = OpNames(module, path, PROMOTE, register_promote_function)


functional_overrides = partial(Overrides, torch.nn.functional, "torch.nn.functional")
tensor_overrides = partial(Overrides, torch.Tensor, "torch.Tensor")
torch_overrides = partial(Overrides, torch, "torch")
