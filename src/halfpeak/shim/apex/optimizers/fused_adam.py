"""``apex.optimizers.fused_adam``."""

from halfpeak.shim.emulated.optimizers.adam import FusedAdam

__all__ = ["FusedAdam"]
