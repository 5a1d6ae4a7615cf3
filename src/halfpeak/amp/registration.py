"""Functions that the user registers to be cast, by name before ``initialize`` or with a decorator."""

from __future__ import annotations

from typing import Any, Final

import torch

from halfpeak.casting.casts import OpCasts
from halfpeak.casting.registry import Place, Registrations, float_function, low_function, promote_function

half_function = low_function
"""Decorator: cast the function's floating arguments to the low dtype of the casts that are on."""
bfloat16_function = low_function
"""Decorator, for scripts of the ROCm fork: the same as :data:`half_function`; the casts that are on determine the dtype."""


Saved = list[tuple[list[Place], list[Place]]]
"""Each list of registrations with a copy of its content."""


class _Registered:
    """The functions registered in this process. They apply to casts made later, not to earlier ones."""

    def __init__(self) -> None:
        self.low: list[Place] = []
        self.float32: list[Place] = []
        self.promote: list[Place] = []

    def saved(self) -> Saved:
        return [(kind, list(kind)) for kind in (self.low, self.float32, self.promote)]

    def add(self, kind: list[Place], module: Any, name: str) -> None:
        place = (module, name)
        Registrations(low=(place,))  # raises for a function that no later initialize could use
        for other in (self.low, self.float32, self.promote):
            # The last registration of a name wins.
            if place in other:
                other.remove(place)
        kind.append(place)

    def registrations(self) -> Registrations:
        return Registrations(low=tuple(self.low), float32=tuple(self.float32), promote=tuple(self.promote))


_registered: Final = _Registered()


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the low dtype at O1 and O4. Call it before ``initialize``.

    For a torch function it replaces the built-in rule; a function of another module is replaced there while casts are
    on.

    Raises:
        ConfigError: ``module`` has no such function.
    """
    _registered.add(_registered.low, module, name)


register_bfloat16_function = register_half_function
"""For scripts of the ROCm fork: the same as :func:`register_half_function`; the level determines the dtype."""


def register_float_function(module: Any, name: str) -> None:
    """Run ``module.name`` in float32 at O1 and O4. See :func:`register_half_function`."""
    _registered.add(_registered.float32, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the widest dtype of its arguments. See :func:`register_half_function`."""
    _registered.add(_registered.promote, module, name)


def saved() -> Saved:
    """Everything registered so far, for :func:`restore`."""
    return _registered.saved()


def restore(state: Saved) -> None:
    """Forget what was registered since :func:`saved`."""
    for kind, held in state:
        kind[:] = held


def make_casts(
    dtype: torch.dtype | None, verbosity: int, *, cache: bool = True, allow_banned: bool = False
) -> OpCasts | None:
    """A casting scope with everything registered so far; None without a dtype."""
    if dtype is None:
        return None
    return OpCasts(
        dtype,
        registrations=_registered.registrations(),
        cache=cache,
        allow_banned=allow_banned,
        on_cast=print if verbosity == 2 else None,
    )


__all__ = [
    "bfloat16_function",
    "float_function",
    "half_function",
    "make_casts",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]
