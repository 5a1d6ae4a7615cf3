"""``apex.optimizers.fused_novograd``."""

from halfpeak.amp.optimizers.novograd import FusedNovoGrad

__all__ = ["FusedNovoGrad"]
