"""``apex.optimizers.fused_lamb``."""

from halfpeak.amp.optimizers.lamb import FusedLAMB

__all__ = ["FusedLAMB"]
