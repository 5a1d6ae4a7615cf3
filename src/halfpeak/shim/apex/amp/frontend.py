"""``apex.amp.frontend``."""

from halfpeak.amp import load_state_dict, state_dict
from halfpeak.core.levels import LEVELS as opt_levels
from halfpeak.core.levels import Properties
from halfpeak.shim.emulated.amp import initialize

O0, O1, O2, O3, O4, O5 = opt_levels.values()

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "Properties",
    "initialize",
    "load_state_dict",
    "opt_levels",
    "state_dict",
]
