"""``apex.optimizers.fused_novograd``."""

from halfpeak.shim.emulated.optimizers.novograd import FusedNovoGrad

__all__ = ["FusedNovoGrad"]
