"""``apex.contrib.optimizers.fused_lamb``."""

from halfpeak.amp.optimizers.contrib import FusedLAMB

__all__ = ["FusedLAMB"]
