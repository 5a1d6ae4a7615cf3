"""Fused optimizers: one read and one pass over blocks of memory per step, on any device."""

from halfpeak.fused.adagrad import FusedAdagrad
from halfpeak.fused.adam import FusedAdam, FusedAdamW
from halfpeak.fused.lamb import FusedLAMB
from halfpeak.fused.novograd import FusedNovoGrad
from halfpeak.fused.sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedAdamW", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
