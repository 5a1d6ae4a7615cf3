"""``apex.contrib.optimizers.fused_sgd``."""

from halfpeak.shim.emulated.optimizers.contrib import FusedSGD

__all__ = ["FusedSGD"]
