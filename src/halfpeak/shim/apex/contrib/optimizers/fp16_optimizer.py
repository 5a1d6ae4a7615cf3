"""``apex.contrib.optimizers.fp16_optimizer``."""

from halfpeak.amp.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
