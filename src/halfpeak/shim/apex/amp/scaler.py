"""``apex.amp.scaler``."""

from halfpeak.amp.scaler import LossScaler

__all__ = ["LossScaler"]
