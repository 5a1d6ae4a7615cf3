"""``apex.amp.lists``: the rules of operations, as lists of names that a script may edit before ``initialize``."""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
