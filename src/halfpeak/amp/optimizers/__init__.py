"""``apex.optimizers`` as of 25.04: halfpeak's fused optimizers under apex's arguments, rules and state.

New code is better served by :mod:`halfpeak.fused`, whose arguments are torch's: there, ``FusedAdamW`` is what ``FusedAdam``
is here by default.
"""

from halfpeak.amp.optimizers.adagrad import FusedAdagrad
from halfpeak.amp.optimizers.adam import FusedAdam
from halfpeak.amp.optimizers.lamb import FusedLAMB, FusedMixedPrecisionLamb
from halfpeak.amp.optimizers.novograd import FusedNovoGrad
from halfpeak.amp.optimizers.sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
