"""The former name of :mod:`halfpeak.checkpoint.scaler_states`, for programs that import it."""

from halfpeak.checkpoint.scaler_states import (
    Format,
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
    "Format",
    "ScalerState",
    "from_apex",
    "from_grad_scaler",
    "from_mmcv",
    "from_mmengine",
    "read_config",
    "recognise",
    "to_apex",
    "to_grad_scaler",
    "to_mmcv",
    "to_mmengine",
    "translate",
]
