"""Fused optimizers: each step reads the gradients once and updates flat buffers in one pass, on any device."""

from halfpeak.fused.rules.adagrad import FusedAdagrad
from halfpeak.fused.rules.adam import FusedAdam, FusedAdamW
from halfpeak.fused.rules.lamb import FusedLAMB
from halfpeak.fused.rules.novograd import FusedNovoGrad
from halfpeak.fused.rules.sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedAdamW", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
