"""``apex.optimizers`` as of 25.04: halfpeak's fused optimizers with apex's arguments, rules and state.

New code is better served by :mod:`halfpeak.fused`, which has torch's arguments. ``FusedAdam`` with its defaults here is
``FusedAdamW`` there.
"""

from halfpeak.amp.optimizers.apex import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
