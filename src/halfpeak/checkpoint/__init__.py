"""Checkpoint files: atomic, verified and made of plain data; and those of other libraries, inspected and converted."""

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
from halfpeak.checkpoint.forms.conversion import Conversion, convert
from halfpeak.checkpoint.forms.inspection import Report, inspect

__all__ = [
    "Conversion",
    "Report",
    "ScalerState",
    "convert",
    "from_apex",
    "from_grad_scaler",
    "from_mmcv",
    "from_mmengine",
    "inspect",
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
