"""``apex.amp.lists.functional_overrides``."""

import torch

from halfpeak.amp import register_float_function, register_half_function, register_promote_function
from halfpeak.shim.emulated.op_lists import FLOAT32, LOW, PROMOTE, OpNames

MODULE = torch.nn.functional
FP16_FUNCS = OpNames(MODULE, "torch.nn.functional", LOW, register_half_function)
FP32_FUNCS = OpNames(MODULE, "torch.nn.functional", FLOAT32, register_float_function)
CASTS = OpNames(MODULE, "torch.nn.functional", PROMOTE, register_promote_function)
