"""``apex.optimizers.fused_lamb``."""

from halfpeak.shim.emulated.optimizers.lamb import FusedLAMB

__all__ = ["FusedLAMB"]
