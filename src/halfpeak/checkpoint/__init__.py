"""Checkpoint files: atomic, checked and of plain data; checkpoints of other libraries are inspected and converted."""

from halfpeak.checkpoint.conversion import Conversion, convert
from halfpeak.checkpoint.file import load, previous_path, save, verify
from halfpeak.checkpoint.inspection import Report, inspect
from halfpeak.checkpoint.scaler_states import (
    from_apex,
    from_grad_scaler,
    from_mmcv,
    read_config,
    recognise,
    to_apex,
    to_grad_scaler,
    translate,
)
from halfpeak.core.schedule import ScalerState

__all__ = [
    "Conversion",
    "Report",
    "ScalerState",
    "convert",
    "from_apex",
    "from_grad_scaler",
    "from_mmcv",
    "inspect",
    "load",
    "previous_path",
    "read_config",
    "recognise",
    "save",
    "to_apex",
    "to_grad_scaler",
    "translate",
    "verify",
]
