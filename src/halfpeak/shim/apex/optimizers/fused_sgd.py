"""``apex.optimizers.fused_sgd``."""

from halfpeak.amp.optimizers.sgd import FusedSGD

__all__ = ["FusedSGD"]
