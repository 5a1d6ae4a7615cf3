"""``apex.contrib.optimizers.fused_sgd``."""

from halfpeak.amp.optimizers.contrib import FusedSGD

__all__ = ["FusedSGD"]
