"""Fused optimizers: one read and one pass over blocks of memory per step, on any device."""

from halfpeak.fused.adam import FusedAdam, FusedAdamW

__all__ = ["FusedAdam", "FusedAdamW"]
