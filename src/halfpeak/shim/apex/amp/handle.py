"""``apex.amp.handle``."""

from halfpeak.amp import disable_casts, scale_loss
from halfpeak.amp.ambient import Handle as AmpHandle

NoOpHandle = AmpHandle

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]
