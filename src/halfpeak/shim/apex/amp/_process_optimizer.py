"""``apex.amp._process_optimizer``."""

from halfpeak.shim.emulated.stash import AmpStash as AmpOptimizerState

__all__ = ["AmpOptimizerState"]
