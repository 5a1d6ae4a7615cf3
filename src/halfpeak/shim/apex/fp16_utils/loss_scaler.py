"""``apex.fp16_utils.loss_scaler``."""

from halfpeak.amp.fp16_loss_scalers import DynamicLossScaler, LossScaler
from halfpeak.amp.fp16_utils import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]
