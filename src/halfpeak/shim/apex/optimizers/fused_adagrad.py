"""``apex.optimizers.fused_adagrad``."""

from halfpeak.shim.emulated.optimizers.adagrad import FusedAdagrad

__all__ = ["FusedAdagrad"]
