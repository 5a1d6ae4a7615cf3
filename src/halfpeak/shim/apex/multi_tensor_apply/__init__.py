"""``apex.multi_tensor_apply`` as of 25.04."""

from .multi_tensor_apply import MultiTensorApply, multi_tensor_applier

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
