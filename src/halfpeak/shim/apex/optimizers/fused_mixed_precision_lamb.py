"""``apex.optimizers.fused_mixed_precision_lamb``."""

from halfpeak.shim.emulated.optimizers.lamb import FusedMixedPrecisionLamb

__all__ = ["FusedMixedPrecisionLamb"]
