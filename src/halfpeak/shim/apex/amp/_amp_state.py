"""``apex.amp._amp_state``."""

from halfpeak.amp import master_params
from halfpeak.amp.messages import maybe_print, warn_or_err
from halfpeak.amp.session import AmpState, _amp_state

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]
