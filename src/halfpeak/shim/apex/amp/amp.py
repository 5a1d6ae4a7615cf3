"""``apex.amp.amp``."""

from halfpeak.amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "bfloat16_function",
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]
