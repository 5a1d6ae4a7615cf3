"""``apex.contrib.optimizers.fused_lamb``."""

from halfpeak.shim.emulated.optimizers.contrib import FusedLAMB

__all__ = ["FusedLAMB"]
