"""``apex.amp.opt``."""

from halfpeak.amp.old_entry import OptimWrapper

__all__ = ["OptimWrapper"]
