"""``apex.fp16_utils`` as of apex 25.04: half models, master parameters and loss scaling by hand, on any device.

Unlike apex, halfpeak does not deprecate these names and issues no warnings. New code is shorter with
:func:`halfpeak.prepare`.
"""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from halfpeak.amp.fp16_utils.fp16_optimizer import FP16_Optimizer
from halfpeak.amp.fp16_utils.fp16util import (
    BN_convert_float,
    FP16Model,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from halfpeak.amp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from halfpeak.casting.modules import convert_module, convert_network

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
