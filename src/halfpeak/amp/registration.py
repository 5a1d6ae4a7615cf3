"""Functions that the user registers to be cast, by name before ``initialize`` or with a decorator."""

from __future__ import annotations

from typing import Any

import torch

from halfpeak.amp.session import _amp_state
from halfpeak.casting.casts import OpCasts
from halfpeak.casting.registry import CastRule, dispatched_paths, low_function

half_function = low_function
"""Decorator: cast the function's floating arguments to the low-precision dtype of the active casts."""
bfloat16_function = low_function
"""Decorator for scripts of the ROCm fork: the same as :data:`half_function`; the active casts determine the dtype."""


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the low dtype at O1 and O4. Call it before ``initialize``.

    A torch function gets this rule in place of its built-in one. Any other function is replaced in ``module`` while
    casts are on.

    Raises:
        ConfigError: ``module`` has no such function.
    """
    _register(module, name, "low")


register_bfloat16_function = register_half_function
"""For scripts of the ROCm fork: the same as :func:`register_half_function`; the level determines the dtype."""


def register_float_function(module: Any, name: str) -> None:
    """Run ``module.name`` in float32 at O1 and O4. See :func:`register_half_function`."""
    _register(module, name, "float32")


def register_promote_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the widest dtype of its arguments. See :func:`register_half_function`."""
    _register(module, name, "promote")


def _register(module: Any, name: str, rule: CastRule) -> None:
    place = (module, name)
    dispatched_paths(module, name)  # raises for a function that no later initialize could use
    _amp_state.registered.pop(place, None)  # the last registration of a name wins
    _amp_state.registered[place] = rule


def make_casts(
    dtype: torch.dtype | None, verbosity: int, *, cache: bool = True, allow_banned: bool = False
) -> OpCasts | None:
    """Return a casting scope with the functions registered so far; None without a dtype."""
    if dtype is None:
        return None
    return OpCasts(
        dtype,
        registrations=_amp_state.registered,
        cache=cache,
        allow_banned=allow_banned,
        on_cast=print if verbosity == 2 else None,
    )
