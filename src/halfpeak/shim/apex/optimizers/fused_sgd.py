"""``apex.optimizers.fused_sgd``."""

from halfpeak.shim.emulated.optimizers.sgd import FusedSGD

__all__ = ["FusedSGD"]
