"""``apex.contrib.optimizers.fused_adam``."""

from halfpeak.amp.optimizers.contrib import FusedAdam

__all__ = ["FusedAdam"]
