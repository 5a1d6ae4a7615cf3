"""The deprecation warning of apex 25.04, for scripts that filter it."""

from __future__ import annotations

import warnings

from halfpeak.parts.found_inf import is_first_rank


class DeprecatedFeatureWarning(FutureWarning):
    """The warning of apex 25.04 for ``amp`` and ``fp16_utils``. halfpeak deprecates neither and never issues it."""


def deprecated_warning(msg: str) -> None:
    """Issue a :class:`DeprecatedFeatureWarning`, on the first rank."""
    if is_first_rank():
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)
