"""``apex.multi_tensor_apply.multi_tensor_apply``."""

from halfpeak.amp.multi_tensor import MultiTensorApply, multi_tensor_applier

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
