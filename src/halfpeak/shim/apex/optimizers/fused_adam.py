"""``apex.optimizers.fused_adam``."""

from halfpeak.amp.optimizers.adam import FusedAdam

__all__ = ["FusedAdam"]
