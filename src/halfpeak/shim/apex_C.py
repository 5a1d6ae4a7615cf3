"""``apex_C``: tensors in one flat tensor and back, which scripts that reduce gradients by hand import."""

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = ["flatten", "unflatten"]
