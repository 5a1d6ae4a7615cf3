"""``apex.DeprecatedFeatureWarning`` and ``apex.deprecated_warning``."""

from __future__ import annotations

import warnings

from halfpeak.parts.verdict import is_first_rank


class DeprecatedFeatureWarning(FutureWarning):
    """What apex 25.04 issued where ``amp`` and ``fp16_utils`` were used. halfpeak issues none: here they are not deprecated."""


def deprecated_warning(msg: str) -> None:
    """Warn once more, on the first rank."""
    if is_first_rank():
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)
