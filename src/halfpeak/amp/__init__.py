"""The interface of ``apex.amp``: write ``from halfpeak import amp`` and change nothing else.

Compatible with apex 25.04 and, for O4 and O5, with its ROCm fork; ``docs/compat/apex.md`` lists names and differences.
"""

from halfpeak.amp.ambient import disable_casts, init
from halfpeak.amp.frontend import initialize, load_state_dict, state_dict
from halfpeak.amp.handle import last_step, master_params, scale_loss
from halfpeak.amp.registration import (
    bfloat16_function,
    half_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from halfpeak.amp.session import _amp_state
from halfpeak.casting.registry import float_function, promote_function

__all__ = [
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "last_step",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
