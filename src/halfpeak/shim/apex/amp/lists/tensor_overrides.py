"""``apex.amp.lists.tensor_overrides``."""

import torch

from halfpeak.amp import register_float_function, register_half_function, register_promote_function
from halfpeak.shim.emulated.op_lists import FLOAT32, LOW, PROMOTE, OpNames

MODULE = torch.Tensor
FP16_FUNCS = OpNames(MODULE, "torch.Tensor", LOW, register_half_function)
FP32_FUNCS = OpNames(MODULE, "torch.Tensor", FLOAT32, register_float_function)
CASTS = OpNames(MODULE, "torch.Tensor", PROMOTE, register_promote_function)
