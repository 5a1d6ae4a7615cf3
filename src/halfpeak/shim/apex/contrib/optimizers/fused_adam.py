"""``apex.contrib.optimizers.fused_adam``."""

from halfpeak.shim.emulated.optimizers.contrib import FusedAdam

__all__ = ["FusedAdam"]
