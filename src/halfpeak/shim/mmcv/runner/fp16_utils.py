"""``mmcv.runner.fp16_utils`` as of 1.7.2."""

from halfpeak.runner import LossScaler, allreduce_grads, auto_fp16, force_fp32, wrap_fp16_model
from halfpeak.runner.casting import cast_tensor_type
from halfpeak.runner.fp16_model import patch_norm_fp32

__all__ = [
    "LossScaler",
    "allreduce_grads",
    "auto_fp16",
    "cast_tensor_type",
    "force_fp32",
    "patch_norm_fp32",
    "wrap_fp16_model",
]
