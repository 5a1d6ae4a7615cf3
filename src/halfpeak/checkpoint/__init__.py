"""Checkpoint files: atomic, verified and made of plain data; and the loss-scaler states of other libraries."""

from halfpeak.checkpoint.file import load, load_plain, previous_path, save, verify
from halfpeak.checkpoint.foreign import (
    ScalerState,
    from_apex,
    from_grad_scaler,
    from_mmcv,
    from_mmengine,
    read_config,
    recognise,
    to_apex,
    to_grad_scaler,
    to_mmcv,
    to_mmengine,
    translate,
)

__all__ = [
    "ScalerState",
    "from_apex",
    "from_grad_scaler",
    "from_mmcv",
    "from_mmengine",
    "load",
    "load_plain",
    "previous_path",
    "read_config",
    "recognise",
    "save",
    "to_apex",
    "to_grad_scaler",
    "to_mmcv",
    "to_mmengine",
    "translate",
    "verify",
]
