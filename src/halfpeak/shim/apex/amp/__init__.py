"""``apex.amp``."""

from halfpeak.amp import *  # noqa: F403
