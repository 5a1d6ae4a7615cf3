"""``apex.fp16_utils.fp16_optimizer``."""

from halfpeak.amp.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
