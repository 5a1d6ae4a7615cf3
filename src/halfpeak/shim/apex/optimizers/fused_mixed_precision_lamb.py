"""``apex.optimizers.fused_mixed_precision_lamb``."""

from halfpeak.amp.optimizers.lamb import FusedMixedPrecisionLamb

__all__ = ["FusedMixedPrecisionLamb"]
