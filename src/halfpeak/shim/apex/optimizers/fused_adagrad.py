"""``apex.optimizers.fused_adagrad``."""

from halfpeak.amp.optimizers.adagrad import FusedAdagrad

__all__ = ["FusedAdagrad"]
